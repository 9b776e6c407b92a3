"""What a person sees while a phase runs."""

from __future__ import annotations

import io

from rich.console import Console

from lightning_mtrl.algorithms.progress import PhaseProgress


def _shown(terminal: bool, stop: int = 3) -> str:
    file = io.StringIO()
    progress = PhaseProgress("improve", "round", Console(file=file, force_terminal=terminal, width=120))
    for number in progress.over(range(3), 3):
        progress.show(mean_q=0.25 * (number + 1), kl=1.5)
        if number == stop:
            break
    return file.getvalue()


def test_a_terminal_shows_the_round_and_the_numbers_of_a_phase() -> None:
    text = _shown(terminal=True)
    assert "improve: round" in text
    assert "3/3" in text
    assert "mean q 0.75, kl 1.5" in text


def test_the_bar_is_over_when_a_phase_stops_early() -> None:
    text = _shown(terminal=True, stop=0)
    assert "0/3" in text
    assert text.endswith("\x1b[?25h") or "\x1b[?25h" in text  # the cursor is shown again


def test_a_file_gets_nothing_but_the_results() -> None:
    assert _shown(terminal=False) == ""
