"""The embedded models behind the name `tiny`: Llamas of under a million parameters, tokenizers, and pi_0.

There is one for the sales shop and one for the tasks with a withheld fact; an environment says which one
speaks its language (`tiny_model_of`). Each base was trained on scripted conversations of agents of all
skills, the users' words included; pi_0 is a LoRA adapter that makes a mediocre agent of it.
`scripts/build_tiny.py` rebuilds them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_mtrl.errors import UserError

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


@dataclass(frozen=True)
class TinyModel:
    """An embedded model.

    Attributes:
        folder: its files; the adapter of its pi_0 is in the folder "pi_0" inside.
        hidden_size, intermediate_size, num_layers, num_heads: the size of its Llama.
    """

    folder: Path
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int

    @property
    def adapter(self) -> Path:
        """Folder of pi_0."""
        return self.folder / "pi_0"


TINY_MODELS = {
    "sales": TinyModel(Path(__file__).with_name("tiny_weights"), 128, 320, 3, 8),
    "tasks": TinyModel(Path(__file__).with_name("tiny_weights_tasks"), 64, 192, 3, 4),
}
TINY_FOLDER = TINY_MODELS["sales"].folder
TINY_ADAPTER = TINY_MODELS["sales"].adapter
PAD, USER, ASSISTANT, SYSTEM, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tiny_model_of(environment: object) -> str:
    """Name of the embedded model that speaks an environment's language.

    It is the environment's class attribute `tiny_model`; "sales" for those that have none.

    Raises:
        UserError: if there is no embedded model of that name.
    """
    name = getattr(environment, "tiny_model", "sales")
    if name not in TINY_MODELS:
        raise UserError(
            f"model.name is 'tiny', but {type(environment).__name__}.tiny_model is {name!r}, and the "
            f"embedded models are {', '.join(TINY_MODELS)}. Change it, or give another model.name."
        )
    return name


def load_tiny(
    name: str = "sales", dtype: str = "float32"
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A base model and its tokenizer, from the files inside the package.

    Args:
        name: "sales" or "tasks".
        dtype: of its weights; the rotary positions stay in fp32.

    Raises:
        UserError: if the installation lacks the weights.
    """
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging as transformers_logging

    folder = TINY_MODELS[name].folder
    if not (folder / "model.safetensors").is_file():
        raise UserError(
            f"model.name is 'tiny', but its weights are not in {folder}. "
            f"Install the package again, or rebuild them with: python scripts/build_tiny.py --model {name}"
        )
    transformers_logging.disable_progress_bar()  # a bar that is over at once
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    return model, PreTrainedTokenizerFast.from_pretrained(folder)


def build_tokenizer(texts: Iterable[str], vocabulary: int = 640) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose merges make every word of `texts` one token.

    Any other text still has tokens (bytes at worst), so any log can be read, and decoding gives back the
    very text that was encoded.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, USER, ASSISTANT, SYSTEM, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_config(size: TinyModel, vocabulary: int, pad_id: int, end_id: int) -> LlamaConfig:
    """The architecture of an embedded model."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_heads,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        initializer_range=0.06,
        tie_word_embeddings=True,
        pad_token_id=pad_id,
        bos_token_id=None,
        eos_token_id=end_id,
    )
