from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from lightning_mtrl.commands.score import noted
from lightning_mtrl.errors import UserError
from lightning_mtrl.rollouts.logs import LoadedLogs, stream_conversations, write_conversations


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", r"log\.jsonl: 0 of 0 conversations could be read.* Left out: none\."),
        ("{\n[1]\n{\n", r"log\.jsonl: 0 of 3 conversations .* Left out: not JSON 2, not an object 1\."),
    ],
)
def test_a_log_of_which_nothing_could_be_read_is_refused_and_nothing_is_written(
    tmp_path: Path, text: str, told: str
) -> None:
    log, output, loaded = tmp_path / "log.jsonl", tmp_path / "scored.jsonl", LoadedLogs()
    log.write_text(text)
    output.write_text("of an earlier scoring")
    with pytest.raises(UserError, match=told):
        write_conversations(output, noted(stream_conversations(log, loaded), Counter(), loaded))
    assert output.read_text() == "of an earlier scoring"
