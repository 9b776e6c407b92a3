"""The embedded model `tiny`: a Llama of under a million parameters, its tokenizer, and its pi_0.

The base was trained on scripted conversations of agents of all skills, the customers' words included;
pi_0 is a LoRA adapter that makes a mediocre agent of it. `scripts/build_tiny.py` rebuilds both.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_mtrl.errors import UserError

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TINY_FOLDER = Path(__file__).with_name("tiny_weights")
TINY_ADAPTER = TINY_FOLDER / "pi_0"
PAD, USER, ASSISTANT, SYSTEM, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def load_tiny() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The base model in fp32 and its tokenizer, from the files inside the package.

    Raises:
        UserError: if the installation lacks the weights.
    """
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging as transformers_logging

    if not (TINY_FOLDER / "model.safetensors").is_file():
        raise UserError(
            f"model.name is 'tiny', but its weights are not in {TINY_FOLDER}. "
            f"Install the package again, or rebuild them with: python scripts/build_tiny.py"
        )
    transformers_logging.disable_progress_bar()  # a bar that is over at once
    model = LlamaForCausalLM.from_pretrained(TINY_FOLDER, dtype="float32")
    return model, PreTrainedTokenizerFast.from_pretrained(TINY_FOLDER)


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


def tiny_config(vocabulary: int, pad_id: int, end_id: int) -> LlamaConfig:
    """The architecture of `tiny`."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        initializer_range=0.06,
        tie_word_embeddings=True,
        pad_token_id=pad_id,
        bos_token_id=None,
        eos_token_id=end_id,
    )
