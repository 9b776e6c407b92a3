"""Files of records, as logs and data sets are kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_records(folder: Path, ending: str, records: Sequence[Any]) -> Path:
    """Write records into `folder`: "parquet", "json" (one list), or any other ending for a record a line."""
    path = folder / f"records.{ending}"
    if ending == "parquet":
        from datasets import Dataset

        Dataset.from_list(list(records)).to_parquet(path)
    elif ending == "json":
        path.write_text(json.dumps(records))
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
