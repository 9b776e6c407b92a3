"""The embedded model of the tasks: what its base knows, and how its pi_0 plays."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_mtrl import assembly
from lightning_mtrl.environments import SuggestedResponse
from lightning_mtrl.errors import UserError
from lightning_mtrl.models import tiny
from lightning_mtrl.models.tiny import TINY_MODELS, tiny_model_of
from lightning_mtrl.parsing import load_config

CONFIGS = Path(__file__).parents[2] / "configs"
TASKS = ("math_tutoring", "document_writing", "medical_recommendation")


@pytest.fixture
def recipe() -> ModuleType:
    import tiny_recipes

    return tiny_recipes


def _parts(task: str, *overrides: str) -> assembly.Parts:
    files = [CONFIGS / "itpo.yaml", CONFIGS / "tasks" / f"{task}.yaml", CONFIGS / "size" / "tiny.yaml"]
    return assembly.assemble(load_config(*files, overrides=overrides), show_progress=False)


def test_the_base_knows_answers_facts_and_reactions(recipe: ModuleType) -> None:
    """`right` cannot come near 1: in the base's training some agents do not use what they hear."""
    folder = TINY_MODELS["tasks"].folder
    model = LlamaForCausalLM.from_pretrained(folder, dtype="float32").eval()
    chances = recipe.TasksRecipe().probe(model, PreTrainedTokenizerFast.from_pretrained(folder))
    for name in ("MathTutoring", "DocumentWriting", "MedicalRecommendation"):
        assert chances[f"{name} right"] > 0.6, chances
        assert chances[f"{name} told"] > 0.8, chances
        assert chances[f"{name} pleased"] > 0.8, chances


@pytest.mark.parametrize("task", TASKS)
def test_pi_0_succeeds_sometimes_in_short_conversations(task: str) -> None:
    """Success rate between 0.1 and 0.4 of the optimum.

    Measured 0.28, 0.34 and 0.28; with 512 conversations the standard error is 0.021.
    """
    parts = _parts(task)
    with parts.backbone.sampling("policy") as model:
        rollouts = parts.validator.collect(model, conversations=512, seed=1, policy="pi_0")
    conversations = rollouts.conversations
    best = parts.environment.optimum(1.0).success_rate  # type: ignore[attr-defined]
    succeeded = sum(float(c.outcome or 0) > 0.5 for c in conversations) / len(conversations)
    assert 0.1 < succeeded / best < 0.4
    assert rollouts.truncated == 0
    assert rollouts.dropped == {}
    lengths = [len(t.response_ids) for c in conversations for t in c.turns]
    assert sum(length > 12 for length in lengths) < 0.01 * len(lengths)  # a response may ramble
    assert max(len(c.token_ids()) for c in conversations) <= 120
    assert all(1 <= c.metadata["pivotal_turn"] <= len(c.turns) <= 8 for c in conversations)
    assert sum(len(c.turns) for c in conversations) / len(conversations) > 6


def test_an_environment_says_which_embedded_model_it_needs() -> None:
    assert tiny_model_of(SuggestedResponse()) == "sales"
    assert tiny_model_of(SimpleNamespace()) == "sales"
    parts = _parts("math_tutoring")
    assert tiny_model_of(parts.environment) == "tasks"
    assert parts.backbone.config.hidden_size == TINY_MODELS["tasks"].hidden_size
    with pytest.raises(UserError, match=r"tiny_model is 'chess'.*sales, tasks"):
        tiny_model_of(SimpleNamespace(tiny_model="chess"))


def test_missing_weights_are_told_with_the_command_that_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny.TINY_MODELS, "tasks", replace(TINY_MODELS["tasks"], folder=tmp_path))
    with pytest.raises(UserError, match=r"build_tiny.py --model tasks"):
        tiny.load_tiny("tasks")


def test_another_model_needs_no_embedded_one(tmp_path: Path) -> None:
    shutil.copytree(TINY_MODELS["tasks"].folder, tmp_path / "own")
    parts = _parts("math_tutoring", f"--model.name={tmp_path / 'own'}")
    assert parts.config.model.name.endswith("own")
