"""How work is shared out, and which process speaks. What several do together is in tests/distributed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_mtrl import speaker
from lightning_mtrl.processes import Processes


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("number", [0, 1, 2, 7, 20])
def test_shares_are_the_whole_in_order_and_differ_by_one_at_most(number: int, size: int) -> None:
    shares = [Processes(rank, size).share(number) for rank in range(size)]
    assert [item for share in shares for item in share] == list(range(number))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    dealt = [Processes(rank, size).dealt(range(number)) for rank in range(size)]
    assert sorted(item for share in dealt for item in share) == list(range(number))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_a_process_alone_does_everything_itself() -> None:
    alone = Processes()
    assert alone.is_first
    assert alone.each(lambda: 4) == [4]
    assert alone.first(lambda: 5) == alone.together(lambda: 5) == 5
    assert alone.over("abc", lambda mine: [letter.upper() for letter in mine]) == ["A", "B", "C"]
    weight = nn.Parameter(torch.ones(2))
    alone.sum_gradients([weight])
    assert weight.grad is None
    assert alone.sum(weight) is weight


def test_an_error_of_a_process_alone_is_its_own_and_ends_the_work() -> None:
    alone = Processes()
    with pytest.raises(KeyError):
        alone.each(lambda: {}["nowhere"])
    assert alone.each(lambda: 1) == [1]


@pytest.mark.parametrize(
    ("environment", "first", "first_of_machine"),
    [
        ({}, True, True),
        ({"LOCAL_RANK": "1"}, False, False),
        ({"NODE_RANK": "1", "LOCAL_RANK": "0"}, False, True),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0"}, True, True),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "2", "LOCAL_RANK": "0"}, False, True),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}, False, False),
        ({"RANK": "3"}, True, True),  # left over from something else
    ],
)
def test_the_first_process_speaks(
    environment: dict[str, str], first: bool, first_of_machine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "NODE_RANK", "TORCHELASTIC_RUN_ID", "RANK", "SLURM_NTASKS", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert speaker.is_first() is first
    assert speaker.is_first_of_machine() is first_of_machine
