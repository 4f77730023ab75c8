"""Llama's published shapes, as Hugging Face's models with random weights."""

from __future__ import annotations

from typing import Any

from torch import nn

SHAPES: dict[str, dict[str, int]] = {
    "llama-2-7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
    "llama-2-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    "llama-3-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
}
"""Name → the configuration."""


def llama(name: str, *, layers: int | None = None, **changes: int) -> nn.Module:
    """A language model of one of the SHAPES, with all its layers or some, to train without a cache
    of keys and values, and with torch's attention."""
    import transformers

    shape: dict[str, Any] = {**SHAPES[name], **changes}
    if layers is not None:
        shape["num_hidden_layers"] = layers
    config = transformers.LlamaConfig(**shape, use_cache=False, attn_implementation="sdpa")
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model
