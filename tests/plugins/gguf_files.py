"""GGUF files of small Llamas, as llama.cpp's own tools would write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM

CONTROL, NORMAL = 3, 1  # types of tokens


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    tokens: Sequence[str],
    merges: Sequence[str],
    template: str,
    num_control: int,
) -> None:
    """Write a model with its tokenizer; rotary halves interleaved, as the format wants them.

    Args:
        path: of the file.
        model: whose weights it gets.
        tokens: by id; the first `num_control` are control tokens.
        merges: of the byte-pair encoding, such as "a b".
        template: of chats.
        num_control: number of control tokens.
    """
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    config: Any = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list(tokens))
    writer.add_token_types([CONTROL] * num_control + [NORMAL] * (len(tokens) - num_control))
    writer.add_token_merges(list(merges))
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    writer.add_chat_template(template)
    names: Any = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
            name.split(".")[-2]
        )
        if heads:
            weight = weight.view(heads, 2, -1, config.hidden_size).swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
