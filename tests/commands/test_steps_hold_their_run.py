from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_mtrl import batch_online, cli
from lightning_mtrl.runs.folder import RunFolder
from lightning_mtrl.runs.writer import BeingWritten, only_writer

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


@pytest.mark.parametrize("command", ["evaluate", "improve"])
def test_a_step_from_logs_holds_its_run_while_another_process_opens_it(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    class Step:
        """Opens its own run as `report` or `score` does, in the middle of a checkpoint."""

        def __init__(self, config: Any, folder: RunFolder, *rest: Any) -> None:
            self.folder = folder

        def step(self) -> None:
            half = self.folder.checkpoints / ".iteration-0001.unfinished"
            half.mkdir()
            RunFolder.open(self.folder.path)
            with pytest.raises(BeingWritten), only_writer(self.folder.path):
                pass
            assert half.is_dir()
            self.folder.summary.write_text("{}")
            seen.append(command)

        evaluate = improve = step

    monkeypatch.setattr(batch_online, "BatchOnlineStep", Step)
    log, run = tmp_path / "log.jsonl", tmp_path / "run"
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    rows = [{"id": str(number), "messages": said, "outcome": number % 2} for number in range(8)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [f"--config={CONFIG}", f"--logs={log}", f"--run_dir={run}"]
    assert cli.main([command, *options]) == 0
    assert seen == [command]
    with only_writer(run):  # and lets go of it
        pass
