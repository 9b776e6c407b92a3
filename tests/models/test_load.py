from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_gguf
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from lightning_mtrl.errors import UserError
from lightning_mtrl.models.load import describe_model, load_model
from lightning_mtrl.models.sources import expect_adapter

WORDS = ["<pad>", "<eot>", "<user>", "<bot>", "a", "b", "c", "ab"]
IDS = torch.tensor([[2, 4, 5, 1, 3, 6]])


def _config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip


def _save(folder: Path, template: str | None = "{{ messages[0].content }}<eot>") -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(_config()).eval()
    model.save_pretrained(folder)
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eot>", pad_token="<pad>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return model


def test_a_folder_gives_the_very_weights_and_the_tokenizer(tmp_path: Path) -> None:
    saved = _save(tmp_path)
    loaded = load_model(str(tmp_path))
    assert loaded.name == str(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), loaded.model.parameters(), strict=True))
    assert loaded.tokenizer.convert_tokens_to_ids("c") == 6
    assert not loaded.model.training


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_have_the_type_asked_for(tmp_path: Path, dtype: str) -> None:
    _save(tmp_path)
    kinds = {p.dtype for p in load_model(str(tmp_path), dtype=dtype).model.parameters()}
    assert kinds == {getattr(torch, dtype)}


def test_attention_takes_a_square_mask(tmp_path: Path) -> None:
    _save(tmp_path)
    model = load_model(str(tmp_path)).model
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    with torch.no_grad():
        assert torch.allclose(model(IDS, attention_mask=mask).logits, model(IDS).logits, atol=1e-6)
        mask[..., 1:, 0] = False
        assert not torch.allclose(model(IDS, attention_mask=mask).logits, model(IDS).logits, atol=1e-3)


def test_four_bits_approximate_the_weights_in_less_memory(tmp_path: Path) -> None:
    saved = _save(tmp_path)
    loaded = load_model(str(tmp_path), quantization="nf4").model
    layer = loaded.model.layers[0].mlp.up_proj
    assert type(layer).__name__ == "Linear4bit"
    assert layer.weight.quant_state.quant_type == "nf4"
    assert layer.weight.quant_state.nested
    assert loaded.get_memory_footprint() < 0.6 * saved.get_memory_footprint()
    with torch.no_grad():
        close = torch.cosine_similarity(loaded(IDS).logits.float(), saved(IDS).logits, dim=-1)
    assert close.min() > 0.95


@pytest.fixture
def gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, LlamaForCausalLM]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    model = LlamaForCausalLM(_config()).eval()
    (tmp_path / "given").mkdir()
    write_gguf(tmp_path / "given" / "small.gguf", model, WORDS, ["a b"], "{{ messages[0].content }}<eot>", 4)
    return tmp_path / "given" / "small.gguf", model


def test_a_gguf_file_becomes_ordinary_weights(
    gguf_file: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    path, model = gguf_file
    loaded = load_model(str(path))
    by_key = load_model(str(path.parent), gguf_file=path.name)
    with torch.no_grad():
        assert torch.allclose(loaded.model(IDS).logits, model(IDS).logits, atol=1e-5)
        assert torch.equal(loaded.model(IDS).logits, by_key.model(IDS).logits)
    loaded.model.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert loaded.tokenizer.chat_template == "{{ messages[0].content }}<eot>"


def test_a_gguf_file_in_four_bits_is_written_out_once(
    gguf_file: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    path, _ = gguf_file
    first = load_model(str(path), quantization="nf4")
    (kept,) = (tmp_path / "cache" / "lightning_mtrl").iterdir()
    stamp = (kept / "model.safetensors").stat().st_mtime_ns
    second = load_model(str(path), quantization="nf4")
    assert (kept / "model.safetensors").stat().st_mtime_ns == stamp
    assert type(first.model.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    with torch.no_grad():
        assert torch.equal(first.model(IDS).logits, second.model(IDS).logits)


def test_a_gguf_file_is_described_without_its_weights_and_its_tokenizer_is_read_once(
    gguf_file: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = gguf_file
    read: list[str] = []
    for auto in (AutoTokenizer, AutoModelForCausalLM):
        monkeypatch.setattr(auto, "from_pretrained", _noting(auto, read))
    tokenizer, limit = describe_model(str(path.parent), gguf_file=path.name)
    assert limit == 64
    assert tokenizer.convert_tokens_to_ids("c") == 6
    assert tokenizer.chat_template == "{{ messages[0].content }}<eot>"
    assert read == ["AutoTokenizer"]
    load_model(str(path.parent), gguf_file=path.name)
    assert read == ["AutoTokenizer", "AutoModelForCausalLM"]
    path.touch()
    describe_model(str(path.parent), gguf_file=path.name)
    assert read[2:] == ["AutoTokenizer"], "it may be another file by now"


def _noting(auto: Any, read: list[str]) -> Callable[..., Any]:
    """`from_pretrained` of an auto class, which notes that it was called."""
    real = auto.from_pretrained

    def from_pretrained(*arguments: Any, **options: Any) -> Any:
        read.append(auto.__name__)
        return real(*arguments, **options)

    return from_pretrained


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere", "nowhere.gguf", "a/b/c"])
def test_a_path_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(UserError, match=f"model.name is '{name}', but that path does not exist") as caught:
        load_model(name)
    assert "'tiny'" in str(caught.value)


def test_a_hub_model_out_of_reach_is_named() -> None:
    with pytest.raises(
        UserError, match=r"model\.name is 'nobody/nothing', (which is nothing|but its tokenizer could not)"
    ):
        load_model("nobody/nothing")


def test_a_folder_without_a_model_and_a_missing_gguf_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no file .*config\.json"):
        load_model(str(tmp_path))
    with pytest.raises(UserError, match=r"model\.gguf_file is 'x\.gguf', but there is no file"):
        load_model(str(tmp_path), gguf_file="x.gguf")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match="is not a model"):
        load_model(str(tmp_path / "notes.txt"))


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    _save(tmp_path, template=None)
    with pytest.raises(UserError, match="has no chat template"):
        load_model(str(tmp_path))


def _cut_by_a_byte(content: bytes) -> bytes:
    return content[:-1]


def _cut_in_its_header(content: bytes) -> bytes:
    return content[:100]


def _emptied(content: bytes) -> bytes:
    return b""


def _zeros(content: bytes) -> bytes:
    return bytes(len(content))


def _pointer(content: bytes) -> bytes:
    """What Git leaves where its extension for large files is not there."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize {len(content)}\n".encode()


@pytest.mark.parametrize("damage", [_cut_by_a_byte, _cut_in_its_header, _emptied, _zeros, _pointer])
def test_a_broken_file_of_weights_is_named_before_anything_is_loaded(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    model, folder = _save(tmp_path / "model"), str(tmp_path / "model")
    peft = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    peft.save_pretrained(tmp_path / "adapter")
    adapter = str(tmp_path / "adapter")
    describe_model(folder)
    expect_adapter(adapter)
    looks: list[tuple[Callable[[str], object], str, str]] = [
        (describe_model, folder, "model.safetensors"),
        (load_model, folder, "model.safetensors"),
        (expect_adapter, adapter, "adapter_model.safetensors"),
    ]
    for _, place, name in looks[1:]:
        file = Path(place) / name
        file.write_bytes(damage(file.read_bytes()))
    for look, place, name in looks:
        with pytest.raises(UserError, match=r" is broken \(.+\), but a whole safetensors file was") as told:
            look(place)
        assert str(told.value).startswith(str(Path(place) / name))


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    model = _save(tmp_path)
    kept = {k: v for k, v in model.state_dict().items() if "layers.1.mlp" not in k}
    model.save_pretrained(tmp_path, state_dict=kept)
    with pytest.raises(UserError, match=r"3 of its weights are missing, the first is 'model\.layers\.1\.mlp"):
        load_model(str(tmp_path))


def test_an_unknown_type_is_a_programmers_mistake() -> None:
    with pytest.raises(ValueError, match="dtype must be"):
        load_model("tiny", dtype="float8")


@pytest.mark.real_lm
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_smollm2_answers_also_in_four_bits(smollm2_folder: Path, quantization: str) -> None:
    loaded = load_model(str(smollm2_folder), quantization=quantization)  # type: ignore[arg-type]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = loaded.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = loaded.model.generate(**ids, max_new_tokens=8, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(out[0])
