"""The embedded models: what they know, and whether the script makes them again."""

from __future__ import annotations

import filecmp
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_mtrl.models.tiny import TINY_MODELS

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(SCRIPTS)
    import tiny_recipes

    yield tiny_recipes
    sys.modules.pop("tiny_recipes", None)


def _build(folder: Path, *arguments: str) -> str:
    command = [sys.executable, str(SCRIPTS / "build_tiny.py"), "--output", str(folder), "--threads", "1"]
    run = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def _sale_chances(folder: Path, recipes: ModuleType) -> dict[str, float]:
    model = LlamaForCausalLM.from_pretrained(folder, dtype="float32").eval()
    chances: dict[str, float] = recipes.SalesRecipe().probe(
        model, PreTrainedTokenizerFast.from_pretrained(folder)
    )
    return chances


def _expect_knowledge(chances: dict[str, float]) -> None:
    """True chances in the shop of the base's training: 0.94, 0 and 0.08."""
    assert chances["fitting"] > 0.8
    assert chances["wrong need"] < 0.05
    assert chances["wrong tier"] < 0.15


def test_the_sales_base_knows_what_makes_a_customer_buy(recipes: ModuleType) -> None:
    _expect_knowledge(_sale_chances(TINY_MODELS["sales"].folder, recipes))


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(TINY_MODELS))
def test_the_script_makes_the_shipped_tokenizer_and_the_same_weights_twice(
    model: str, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        _build(tmp_path / name, "--model", model, "--steps", "3")
    shipped = TINY_MODELS[model].folder
    for file in ("tokenizer.json", "config.json"):
        assert filecmp.cmp(tmp_path / "one" / file, shipped / file, shallow=False)
    for file in ("model.safetensors", "pi_0/adapter_model.safetensors"):
        assert filecmp.cmp(tmp_path / "one" / file, tmp_path / "two" / file, shallow=False)


@pytest.mark.rebuild
@pytest.mark.timeout(7200)
def test_a_rebuilt_sales_model_is_as_good_as_the_shipped_one(recipes: ModuleType, tmp_path: Path) -> None:
    _build(tmp_path, "--model", "sales")
    _expect_knowledge(_sale_chances(tmp_path, recipes))
    # In nats a token: the adapter is as near to the mediocre agent as the shipped one.
    assert abs(_pi_0_loss(tmp_path, recipes) - _pi_0_loss(TINY_MODELS["sales"].folder, recipes)) < 0.01


@torch.no_grad()
def _pi_0_loss(folder: Path, recipes: ModuleType) -> float:
    from peft import PeftModel

    base = LlamaForCausalLM.from_pretrained(folder, dtype="float32")
    model = PeftModel.from_pretrained(base, folder / "pi_0").eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    texts = [recipes.SalesRecipe().mediocre_agent(30_000_000 + seed) for seed in range(128)]
    ids, attention = recipes.encode(tokenizer, texts)
    labels = ids.masked_fill(~attention, -100)
    return float(model(input_ids=ids, attention_mask=attention, labels=labels).loss)
