"""What a run will take, found out before it begins."""
