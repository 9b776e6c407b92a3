"""A run as one page that needs nothing else: read from its folder, drawn, and written as HTML."""
