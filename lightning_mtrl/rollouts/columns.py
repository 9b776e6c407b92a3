"""Records of conversations in columns: Parquet files and data sets of the Hugging Face Hub.

Columns have no missing keys, only nulls: a null means that the key is not there. So an abstained suggestion
is written as "".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning_mtrl.errors import UserError


def write_parquet(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write records of `Conversation.to_json`, one a row; what has no fixed keys as JSON text."""
    from datasets import Dataset

    rows = [
        {
            "tokens": None,
            **record,
            "messages": [_message_row(message) for message in record["messages"]],
            "metadata": json.dumps(record["metadata"]),
            "turn_details": json.dumps(record["turn_details"]) if "turn_details" in record else None,
        }
        for record in records
    ]
    features = _features()
    columns = {name: [row[name] for row in rows] for name in features}
    with _quiet(), path.open("wb") as file:
        Dataset.from_dict(columns, features=features).to_parquet(file)


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """Rows of a Parquet file as records.

    Raises:
        UserError: if it is no Parquet file.
    """
    # Directly, and not through datasets, which imports torch to read a file.
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            rows = file.read().to_pylist()
    except (ArrowException, ValueError, OSError) as error:
        raise UserError(
            f"{path} could not be read as Parquet ({error}); one row for each conversation was expected."
        ) from error
    return [_record(row) for row in rows]


def read_hub(name: str) -> Iterator[dict[str, Any]]:
    """Rows of a data set of the Hub as records.

    Args:
        name: "NAME" or "NAME:SPLIT"; a folder with data files serves as well.

    Raises:
        UserError: if it cannot be loaded.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    dataset, _, split = name.partition(":")
    try:
        rows = load_dataset(dataset, split=split or "train")
    except (DatasetsError, ValueError, OSError) as error:
        raise UserError(
            f"hub:{name} could not be loaded ({error}). A data set of the Hub was expected, with "
            f"a split {split or 'train'!r}. Where the Hub is out of reach, give a .jsonl or .parquet file."
        ) from error
    return (_record(row) for row in rows)


def _record(row: Mapping[str, Any]) -> dict[str, Any]:
    record = {key: value for key, value in row.items() if value is not None}
    for key in ("metadata", "turn_details"):
        if isinstance(record.get(key), str):
            # Text that is no JSON is somebody else's column; it is told apart where the record is read.
            with suppress(ValueError):
                record[key] = json.loads(record[key])
    return record


def _message_row(message: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "role": message["role"],
        "content": message["content"],
        "suggestion": (message["suggestion"] or "") if "suggestion" in message else None,
        "disposition": message.get("disposition"),
    }


def _features() -> Any:
    from datasets import Features, List, Value

    text, flag, whole, number = Value("string"), Value("bool"), Value("int64"), Value("float64")
    turn = {
        "response_ids": List(whole),
        "behaviour_logprobs": List(number),
        "observation_ids": List(whole),
        "explored": flag,
    }
    return Features(
        {
            "id": text,
            "messages": List({"role": text, "content": text, "suggestion": text, "disposition": text}),
            "outcome": number,
            "turn_outcomes": List(number),
            "policy": text,
            "terminated": flag,
            "truncated": flag,
            "group": whole,
            "seed": whole,
            "prompt_messages": whole,
            "explored_turn": whole,
            "metadata": text,
            "turn_details": text,
            "tokens": {"prompt_ids": List(whole), "turns": List(turn)},
        }
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars for files that take moments."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()
