"""TensorBoard's event files of a run: how much of them a resumed run keeps."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

EVENT_FILES = "events.out.tfevents.*"
_HEAD = struct.Struct("<QI")  # length of a record, and a checksum of it
_CHECKSUM = 4  # bytes after a record


def keep_summaries(folder: Path, number: int | None) -> int:
    """Cut what came after the first summaries (scalars, texts, figures, histograms) of a run.

    Steps cannot tell it: the next iteration begins at the step at which the last one ended. Every process
    writes a file of its own; they are taken in the order in which they were begun.

    Args:
        folder: of the run.
        number: summaries that stay; None keeps all.

    Returns:
        How many there are then.
    """
    found = 0
    for file in sorted(folder.glob(EVENT_FILES), key=_begun):
        kept, end = _first(file, None if number is None else number - found)
        found += kept
        if number is not None:
            _cut(file, end if kept else 0)
    return found


def _first(file: Path, number: int | None) -> tuple[int, int]:
    """How many summaries a file has, up to a number; and the place where they end."""
    found, end = 0, 0
    for place, event in _records(file):
        is_summary = event.HasField("summary")
        if is_summary and found == number:
            break
        found, end = found + int(is_summary), place
    return found, end


def _cut(file: Path, size: int) -> None:
    if size:
        os.truncate(file, size)
    else:
        file.unlink()


def _begun(file: Path) -> float:
    """Time of the first record, in seconds since 1970; a file without one comes last."""
    return next((event.wall_time for _, event in _records(file)), float("inf"))


def _records(file: Path) -> Iterator[tuple[int, Event]]:
    """Whole records, with the place where each ends; a killed process leaves one that is not whole."""
    with file.open("rb") as stream:
        while len(head := stream.read(_HEAD.size)) == _HEAD.size:
            length, _ = _HEAD.unpack(head)
            data = stream.read(length + _CHECKSUM)
            if len(data) < length + _CHECKSUM:
                return
            yield stream.tell(), Event.FromString(data[:length])
