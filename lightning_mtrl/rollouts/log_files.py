"""The records of a log as they stand in it: lines, rows or items of a list, each with its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.columns import read_hub, read_parquet
from lightning_mtrl.rollouts.log_records import MARK

HUB = "hub:"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # its marks at the beginning of a file


def expect_logs(path: str) -> None:
    """Refuse a path at which there can be no logged conversations, before anything long begins.

    Raises:
        UserError: if there is no such file, its name ends in another way, or it is in UTF-16.
    """
    if path.startswith(HUB):
        return
    if not Path(path).is_file():
        raise UserError(f"{path} is not a file, but logged conversations were expected there.")
    if Path(path).suffix not in (".jsonl", ".json", ".parquet"):
        raise UserError(
            f"{path} ends with {Path(path).suffix!r}, but .jsonl, .json or .parquet was expected."
        )
    expect_utf_8(Path(path))


def expect_utf_8(file: Path) -> None:
    """Refuse a text in UTF-16, as some programs of Windows write it: not one line of it could be read.

    Raises:
        UserError: if the file begins with a mark of it.
    """
    with file.open("rb") as beginning:
        mark = beginning.read(2)
    if mark in UTF_16:
        raise UserError(
            f"{file} begins with {mark.hex(' ').upper()}, so it looks like UTF-16, but a text in UTF-8 was "
            f"expected. Save it as UTF-8, or: iconv -f UTF-16 -t UTF-8 {file} > NEW{file.suffix}"
        )


def records_in(path: str) -> Iterator[tuple[str, int, Any]]:
    """Kind of place, its number from 1, and the record there; of a line, its bytes."""
    expect_logs(path)
    if path.startswith(HUB):
        yield from (("row", *numbered) for numbered in enumerate(read_hub(path.removeprefix(HUB)), 1))
        return
    file = Path(path)
    if file.suffix == ".parquet":
        yield from (("row", *numbered) for numbered in enumerate(read_parquet(file), 1))
    elif file.suffix == ".json":
        yield from (("record", *numbered) for numbered in enumerate(_json_list(file), 1))
    else:
        with file.open("rb") as lines:
            numbered = enumerate(lines, 1)
            yield from (
                ("line", number, line) for number, line in numbered if line.removeprefix(MARK).strip()
            )


def _json_list(file: Path) -> list[Any]:
    try:
        records = json.loads(file.read_bytes().decode("utf-8-sig"))
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}); a list of conversations was expected.") from error
    except RecursionError as error:
        raise UserError(f"{file} nests too deeply; a list of conversations was expected.") from error
    if not isinstance(records, list):
        raise UserError(f"{file} holds no list of conversations; for one JSON object a line, name it .jsonl.")
    return records
