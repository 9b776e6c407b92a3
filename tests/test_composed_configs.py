"""The files of configs/ that are put together: every cell of ITPO's table 1, at both sizes."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lightning_mtrl.algorithms import ITPO
from lightning_mtrl.config import RunConfig
from lightning_mtrl.errors import UserError
from lightning_mtrl.parsing import build_algorithm, build_environment, load_config

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
TASKS = ("math_tutoring", "document_writing", "medical_recommendation", "suggested_response")
CREDITS = {
    "outcome": "Outcome",
    "trajectory_share": "TrajectoryShare",
    "uniform": "Uniform",
    "dirichlet": "Dirichlet",
    "prime": "PRIME",
    "itpo": "ITPO",
    "norm_itpo": "NormITPO",
    "norm_itpo_paper": "NormITPO",
    "llm_judge": "LLMJudge",
    "q_difference": "QDifference",
}
ADVANTAGES = {"gae": "GAE", "rloo": "RLOO", "grpo": "GRPO", "reinforce": "REINFORCE"}
SIZES = ("tiny", "natural")
# Table 2 of the paper: beta, weight of the process rewards, weight of the outcome.
TABLE_2 = {
    ("math_tutoring", "prime"): (0.05, 5.0, 5.0),
    ("math_tutoring", "itpo"): (0.05, 5.0, 5.0),
    ("document_writing", "prime"): (0.005, 5.0, 5.0),
    ("document_writing", "itpo"): (0.005, 5.0, 5.0),
    ("document_writing", "norm_itpo"): (0.005, 5.0, 0.0),
    ("medical_recommendation", "prime"): (0.005, 5.0, 5.0),
    ("medical_recommendation", "norm_itpo"): (0.005, 5.0, 0.0),
}


def composed(task: str, credit: str, advantage: str, size: str, *overrides: str) -> RunConfig:
    parts = ("itpo", f"tasks/{task}", f"credit/{credit}", f"advantage/{advantage}", f"size/{size}")
    return load_config(*(CONFIGS / f"{part}.yaml" for part in parts), overrides=overrides)


def itpo_of(config: RunConfig) -> ITPO:
    algorithm = build_algorithm(config)
    assert isinstance(algorithm, ITPO)
    return algorithm


@pytest.mark.parametrize("part", [*(f"credit/{c}" for c in CREDITS), *(f"advantage/{a}" for a in ADVANTAGES)])
def test_a_part_before_the_file_of_its_algorithm_is_told_to_come_after_it(part: str) -> None:
    file, algorithm = CONFIGS / f"{part}.yaml", CONFIGS / "itpo.yaml"
    with pytest.raises(UserError) as told:
        load_config(file, algorithm)
    assert str(told.value).startswith(f"{file}: algorithm.init_args.")
    assert str(told.value).endswith(f"give {algorithm}, which names a class, first.")
    with pytest.raises(
        UserError, match=r"names no class of algorithm, .* give a file that names one first\."
    ):
        load_config(file)


@pytest.mark.slow  # half a second for each of the fifty compositions
@pytest.mark.parametrize("credit", CREDITS)
def test_every_credit_goes_with_every_estimator(credit: str) -> None:
    for advantage, size in [*((advantage, "tiny") for advantage in ADVANTAGES), ("rloo", "natural")]:
        algorithm = itpo_of(composed("math_tutoring", credit, advantage, size))
        assert type(algorithm.credit).__name__ == CREDITS[credit]
        assert type(algorithm.estimator).__name__ == ADVANTAGES[advantage]


@pytest.mark.parametrize(("task", "size"), list(product(TASKS, SIZES)))
def test_every_task_has_both_sizes(task: str, size: str) -> None:
    config = composed(task, "norm_itpo", "rloo", size)
    environment: Any = build_environment(config)
    assert type(environment).__name__ == "".join(word.title() for word in task.split("_"))
    assert environment.size == size
    patience = getattr(environment, "patience", None)
    assert patience is None or patience.most_turns <= config.data.max_turns
    assert (config.model.name == "tiny") == (size == "tiny")


@pytest.mark.parametrize(("cell", "wanted"), list(TABLE_2.items()), ids=map("-".join, TABLE_2))
def test_the_natural_size_has_the_papers_numbers(
    cell: tuple[str, str], wanted: tuple[float, float, float]
) -> None:
    """Two more cells have a beta of their own, 0.01, to be given by hand: the task's file names them."""
    config = composed(*cell, "rloo", "natural")
    algorithm = itpo_of(config)
    settings, prm = algorithm.settings, algorithm.credit.prm
    assert (prm.beta, settings.process_weight, settings.outcome_weight) == wanted
    assert (config.data.conversations, config.data.group_size, settings.minibatch_groups) == (128, 8, 4)
    assert (settings.kl_coef, settings.entropy_coef, settings.clip_range) == (1e-3, 1e-3, 0.2)
    assert (settings.kl_estimator, settings.dual_clip, prm.max_norm) == ("k3", 3.0, 10.0)
    if cell[1] == "norm_itpo":
        assert algorithm.credit.eta == 0.4  # type: ignore[attr-defined]


def test_the_tiny_size_has_settings_of_its_own() -> None:
    natural, tiny = (itpo_of(composed("math_tutoring", "itpo", "gae", size)) for size in ("natural", "tiny"))
    assert tiny.settings.learning_rate > natural.settings.learning_rate
    assert tiny.credit.prm.beta > natural.credit.prm.beta
