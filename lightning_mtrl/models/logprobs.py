"""Log-probabilities of given tokens from hidden states, without a [tokens, vocabulary] tensor in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from lightning_mtrl.errors import UserError
from lightning_mtrl.models import chunked_head
from lightning_mtrl.models.chunked_head import Entropy, Squash, head_logprobs
from lightning_mtrl.models.layers import evaluating
from lightning_mtrl.models.onednn import OneDNNLinear


@dataclass(frozen=True)
class LogitHead:
    """The output head of a causal language model.

    Attributes:
        head: the linear map from hidden states to the vocabulary.
        softcap: logits are squashed to (-softcap, softcap) by a tanh; 0 for none.
        scale: logits are multiplied by this number.
    """

    head: nn.Module
    softcap: float = 0.0
    scale: float = 1.0

    @classmethod
    def of(cls, model: PreTrainedModel) -> LogitHead:
        """Read the head, and what the model does to its logits, from a model."""
        config = model.config.get_text_config()
        softcap = getattr(config, "final_logit_softcapping", None) or 0.0
        scale = getattr(config, "logit_scale", None) or 1.0
        return cls(model.get_output_embeddings(), float(softcap), float(scale))

    def logits(self, hidden: Float[Tensor, "N H"]) -> Float[Tensor, "N V"]:
        """Logits in fp32."""
        logits: Tensor = self.head(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    @classmethod
    def check(cls, model: PreTrainedModel) -> None:
        """Refuse a model whose logits are not those of its head as it is read here.

        There is no common name for what models do to their logits, so the two are compared.

        Raises:
            UserError: if they differ.
        """
        if model.device.type == "meta":
            return  # without weights there is nothing to compare
        with evaluating(model), torch.no_grad():
            ids = torch.arange(2, device=model.device)[None]
            read = cls.of(model).logits(model.base_model(input_ids=ids).last_hidden_state[0])
            wanted = model(input_ids=ids).logits[0].float()
        if not torch.allclose(read, wanted, rtol=0.02, atol=0.02):
            raise UserError(
                f"the model is a {type(model).__name__}, which changes its logits after the output head in "
                f"a way that is not known here, so log-probabilities would be wrong (logits differ by up to "
                f"{float((read - wanted).abs().max()):.3g}). Use another model for model.name; one "
                f"whose config has logit_scale or final_logit_softcapping is understood."
            )


def token_logprobs(
    head: LogitHead, hidden: Float[Tensor, "N H"], targets: Int[Tensor, " N"]
) -> Float[Tensor, " N"]:
    """Log-probability of each target at temperature 1.

    Works in chunks, so memory does not grow with tokens x vocabulary. Gradients are exact, for the hidden
    states and for a trained head.

    Args:
        head: the output head.
        hidden: hidden states that predict the targets.
        targets: token ids.

    Returns:
        Log-probabilities in nats, fp32.
    """
    return _scored(head, hidden, targets, Entropy(wanted=False, trained=False))[0]


def token_logprobs_and_entropies(
    head: LogitHead, hidden: Float[Tensor, "N H"], targets: Int[Tensor, " N"], entropy_trained: bool = True
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Log-probability of each target and entropy of each distribution, at temperature 1; see above.

    Args:
        head: the output head.
        hidden: hidden states that predict the targets.
        targets: token ids.
        entropy_trained: False for entropies without gradients, which are cheaper.

    Returns:
        Log-probabilities and entropies in nats, fp32.
    """
    return _scored(head, hidden, targets, Entropy(wanted=True, trained=entropy_trained))


def head_width(head: LogitHead) -> int:
    """Size of the vocabulary."""
    weight = head.head.weight
    assert isinstance(weight, Tensor)
    return int(getattr(head.head, "out_features", 0) or weight.size(0))


def _scored(head: LogitHead, hidden: Tensor, targets: Tensor, entropy: Entropy) -> tuple[Tensor, Tensor]:
    if not len(targets):
        empty = hidden.sum(-1).float()
        return empty, empty
    if isinstance(head.head, nn.Linear) and type(head.head) in (nn.Linear, OneDNNLinear):
        squash = Squash(head.softcap, head.scale)
        return head_logprobs(hidden, head.head.weight, head.head.bias, targets, squash, entropy)
    return _through_module(head, hidden, targets, entropy)


def _through_module(
    head: LogitHead, hidden: Tensor, targets: Tensor, entropy: Entropy
) -> tuple[Tensor, Tensor]:
    """For a head that is more than a matrix (in 4 bits, with an adapter): each chunk is computed twice."""
    size = max(1, chunked_head.FROZEN_ELEMENTS // head_width(head))
    parts = []
    for start in range(0, hidden.size(0), size):
        piece = (head, hidden[start : start + size], targets[start : start + size], entropy)
        if torch.is_grad_enabled() and hidden.size(0) > size:
            parts.append(checkpoint(_chunk, *piece, use_reentrant=False))
        else:
            parts.append(_chunk(*piece))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _chunk(head: LogitHead, hidden: Tensor, targets: Tensor, entropy: Entropy) -> tuple[Tensor, Tensor]:
    logprobs = head.logits(hidden).log_softmax(-1)
    chosen = logprobs.gather(1, targets[:, None]).squeeze(1)
    if not entropy.wanted:
        return chosen, torch.zeros_like(chosen)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy.trained):
        return chosen, -(logprobs.exp() * logprobs).sum(-1)
