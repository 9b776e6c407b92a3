"""A random model of a few thousand weights, its chat tokenizer, and conversations made by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning import Trainer
from lightning.fabric import Fabric
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_mtrl.algorithms.base import Context
from lightning_mtrl.batch import ConversationBatch, ImprovementBatch, collate
from lightning_mtrl.conversation import Conversation, Message, Turn
from lightning_mtrl.models.adapters import Backbone
from lightning_mtrl.modules.base import RoleModule
from lightning_mtrl.objectives import token_weights
from lightning_mtrl.rollouts.datamodule import RolloutDataModule
from lightning_mtrl.rollouts.sampling import SamplingConfig
from lightning_mtrl.rollouts.tokens import ChatTokenizer

WORDS = ["<pad>", "<eot>", "<user>", "<bot>", "h", "e", "l", "o", "he", "ll", "llo", "hello", "x", "y"]
MERGES = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
PAD, END, USER, BOT = range(4)
TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<bot>' }}{{ m.content }}<eot>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bot>' }}{% endif %}"
)


def small_llama(seed: int = 0) -> LlamaForCausalLM:
    """Two layers of width 32 over 14 tokens, with weights large enough to tell contexts apart."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, pad_token_id=PAD, eos_token_id=END, bos_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def small_backbone(roles: Sequence[str] = (), dropout: float = 0.0, moved: bool = True) -> Backbone:
    """A backbone with adapters of rank 4; `moved` puts every role away from the base."""
    lora = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    backbone = Backbone(small_llama(), lora=lora)
    for number, role in enumerate(roles):
        backbone.add_role(role)
        if moved:
            move(backbone.parameters_of(role), seed=number)
    return backbone


def move(parameters: Iterable[Tensor], seed: int = 0, by: float = 0.1) -> None:
    """Add noise to weights, so that none of them is zero."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.data += by * torch.randn(parameter.shape, generator=generator)


def small_chat() -> ChatTokenizer:
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, MERGES))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(WORDS[:4])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eot>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    return ChatTokenizer(tokenizer)


def talk(name: str, responses: Sequence[Sequence[int]], rewards: Sequence[float]) -> Conversation:
    """A finished conversation with ids; each response but the last is followed by the same observation."""
    after = (USER, 12, END, BOT)
    turns = [
        Turn(
            "said",
            "heard" if number < len(responses) else "",
            reward=reward,
            response_ids=tuple(ids),
            behaviour_logprobs=(-1.0,) * len(ids),
            observation_ids=after if number < len(responses) else (),
        )
        for number, (ids, reward) in enumerate(zip(responses, rewards, strict=True), start=1)
    ]
    prompt_ids = (USER, 13, END, BOT)
    return Conversation(name, (Message("user", "y"),), tuple(turns), sum(rewards), prompt_ids=prompt_ids)


def some_talks(number: int = 8) -> list[Conversation]:
    """Conversations of one to three turns whose last word decides the outcome."""
    found = []
    for i in range(number):
        good = i % 2
        before = [[4 + (i + k) % 4, END] for k in range(i % 3)]
        last = [11 if good else 8, 4 + i % 6, END]
        found.append(talk(f"c-{i}", [*before, last], [0.0] * len(before) + [float(good)]))
    return found


def conversations_batch(conversations: Sequence[Conversation]) -> ConversationBatch:
    return collate(conversations, PAD, (USER,))


def improvement_batch(conversations: Sequence[Conversation], **fields: Any) -> ImprovementBatch:
    """Whole conversations as rows of an improvement step; the mean is over tokens, advantages are 1."""
    batch = conversations_batch(conversations)
    mask = batch.response_mask
    given = {
        "behaviour_logprobs": batch.behaviour_logprobs,
        "reference_logprobs": batch.behaviour_logprobs,
        "advantages": mask.float(),
        "returns": mask.float(),
        "values": torch.zeros(mask.shape),
        "loss_weights": token_weights(mask),
        **fields,
    }
    return ImprovementBatch(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        predecessor=batch.predecessor,
        response_mask=mask,
        **given,
    )


def plain_trainer(epochs: int) -> Trainer:
    return Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@contextmanager
def watched(backbone: Backbone) -> Iterator[dict[str, list[str]]]:
    """Afterwards holds, for each role and for "base", the names of the weights that changed."""
    before = {name: p.detach().clone() for name, p in backbone.named_parameters()}
    roles = {role: {id(p) for p in backbone.parameters_of(role)} for role in backbone.roles}
    moved: dict[str, list[str]] = {role: [] for role in [*roles, "base"]}
    yield moved
    for name, parameter in backbone.named_parameters():
        if not torch.equal(before[name], parameter):
            owner = next((role for role, own in roles.items() if id(parameter) in own), "base")
            moved[owner].append(name)


def small_context(backbone: Backbone, **fields: Any) -> Context:
    """What an algorithm works with, on one CPU process; `loggers` and `precision` go to Fabric."""
    settings = {name: fields.pop(name) for name in ("loggers", "precision") if name in fields}
    fabric = Fabric(accelerator="cpu", devices=1, **settings)
    fabric.launch()
    chat = small_chat()
    given = {
        "datamodule": RolloutDataModule(tokenizer=chat, batch_size=8),
        "sampling": SamplingConfig(max_response_tokens=6),
        "context_length": 96,
        **fields,
    }
    return Context(fabric, backbone, chat, **given)


def own_weights(module: RoleModule) -> list[Tensor]:
    """A copy of the weights that a module trains."""
    return [parameter.detach().clone() for parameter in module.own_parameters()]
