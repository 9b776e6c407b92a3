"""How near responses are to logged ones, and how likely before the step, on numbers made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from lightning_mtrl.algorithms.coverage import Coverage, coverage
from lightning_mtrl.algorithms.critic_inputs import CriticInputs
from lightning_mtrl.algorithms.policy_improvement import ScoredGroups, SingleTurnImprover


class _Batch:
    """States whose responses have the features and the log-likelihoods that a test wants."""

    def __init__(self, features: Tensor, likelihoods: Tensor) -> None:
        self.features, self.likelihoods = features, likelihoods
        self.input_ids = torch.zeros(len(features), 3, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.features)

    def rows(self, rows: slice) -> _Batch:
        return _Batch(self.features[rows], self.likelihoods[rows])


def _scored(features: Tensor, likelihoods: Tensor) -> ScoredGroups:
    return cast(ScoredGroups, SimpleNamespace(batch=_Batch(features, likelihoods)))


def _measured(known: Tensor, held_out: Tensor, before: ScoredGroups, after: ScoredGroups) -> Coverage:
    read = {"train": known, "held out": held_out}

    def features(conversations: list[str]) -> Any:
        found = read[conversations[0]][:, None]
        return SimpleNamespace(features=found, turn_mask=torch.ones(found.shape[:2], dtype=torch.bool))

    data = SimpleNamespace(train_conversations=["train"], validation_conversations=["held out"])
    inputs = SimpleNamespace(
        context=SimpleNamespace(datamodule=data),
        features=features,
        read_base=lambda passes, batch_of: [batch_of(one).features for one in passes],
    )
    improver = SimpleNamespace(reference_log_likelihood=lambda scored: scored.batch.likelihoods.flatten())
    return coverage(cast(SingleTurnImprover, improver), before, after, cast(CriticInputs, inputs))


def test_the_shares_are_those_counted_by_hand() -> None:
    # Logged features are 0, 1, ..., 9 (and a constant); of the held-out ones all lie within 0.2 of them.
    known = torch.stack([torch.arange(10.0), torch.full((10,), 7.0)], dim=1)
    held_out = known + torch.tensor([0.2, 0.0])
    at = lambda *places: torch.tensor([[[place, 7.0] for place in places]])  # noqa: E731
    usual = torch.linspace(-5.0, -1.0, 4)[None]
    before = _scored(at(0.0, 1.1, 2.1, 9.2), usual)
    after = _scored(at(3.15, 4.5, 12.0, 5.0), torch.tensor([[-1.0, -4.0, -9.0, -2.0]]))
    found = _measured(known, held_out, before, after)
    assert (found.near_before, found.near, found.said) == (1.0, 0.5, 0.75)


def test_a_unit_of_a_feature_does_not_matter() -> None:
    torch.manual_seed(0)
    known, held_out, fresh = torch.randn(200, 5), torch.randn(100, 5), torch.randn(8, 20, 5)
    units = torch.tensor([1.0, 1e3, 1e-2, 5.0, 0.1])
    before, after = (_scored(fresh * s, torch.zeros(8, 20)) for s in (1.0, 1.5))
    scaled = [_scored(one.batch.features * units, torch.zeros(8, 20)) for one in (before, after)]  # type: ignore[attr-defined]
    plain = _measured(known, held_out, before, after)
    assert _measured(known * units, held_out * units, *scaled) == plain
    # Ninety-five of a hundred are near by definition; in 160 draws 0.95 has a standard error of 0.017, the
    # limit of 100 one of 0.022, and 0.85 lies three and a half of both together below.
    assert plain.near_before > 0.85
    assert plain.near < plain.near_before


@pytest.mark.parametrize(("near", "said", "warns"), [(0.95, 0.9, False), (0.7, 0.9, True), (0.9, 0.3, True)])
def test_little_coverage_is_a_warning(near: float, said: float, warns: bool) -> None:
    text = Coverage(0.95, near, said).text(0)
    assert ("WARNING" in text) == warns
    assert f"{100 * near:.0f}% of the new responses" in text
