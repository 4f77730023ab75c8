"""Families that read tokens: Hugging Face models built from their configurations (no download)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.zoo.family import Family, Inputs, Size, class_loss

TINY_TOKENS, PAPER_TOKENS = 32, 512
TINY_VOCABULARY = 128


def tokens(padded: bool) -> Callable[[Size, int, torch.Generator], Inputs]:
    """Keyword arguments: input_ids (batch, tokens), and attention_mask where padded.

    The last row's last quarter is padding, so the mask is not trivial.
    """

    def make(size: Size, batch: int, generator: torch.Generator) -> Inputs:
        length = TINY_TOKENS if size == "tiny" else PAPER_TOKENS
        # All vocabularies are larger; 0, 1 and 2 are padding or special in some of them.
        ids = torch.randint(3, TINY_VOCABULARY, (batch, length), generator=generator)
        if not padded:
            return {"input_ids": ids}
        mask = torch.ones_like(ids)
        mask[-1, -(length // 4) :] = 0
        return {"input_ids": ids, "attention_mask": mask}

    return make


def logits_loss(output: Any) -> Tensor:
    """Cross entropy over all positions of a ModelOutput's logits."""
    return class_loss(output.logits)


GPT2_MEDIUM = {"n_layer": 24, "n_embd": 1024, "n_head": 16}


def make_gpt2(dropout: float, paper: dict[str, int] | None = None) -> Callable[[Size], nn.Module]:
    """GPT-2, small unless told otherwise, with its language-model head, tied to the embedding."""

    def make(size: Size) -> nn.Module:
        rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
        if size == "tiny":
            shape = {"n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 64}
            rates |= {"vocab_size": TINY_VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
        else:
            shape = paper or {}
        config = transformers.GPT2Config(
            **shape, **rates, use_cache=False, attn_implementation="sdpa"
        )
        return transformers.GPT2LMHeadModel(config).train()

    return make


def make_bert(dropout: float) -> Callable[[Size], nn.Module]:
    """BERT base with its masked-language-model head, tied to the embedding."""

    def make(size: Size) -> nn.Module:
        config = transformers.BertConfig(
            **_encoder(size),
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            attn_implementation="sdpa",
        )
        return transformers.BertForMaskedLM(config).train()

    return make


XLM_R = {"vocab_size": 250002, "max_position_embeddings": 514, "type_vocab_size": 1}
XLM_R_LARGE = {
    **XLM_R,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}


def make_xlm_r(paper: dict[str, int]) -> Callable[[Size], nn.Module]:
    """XLM-R with its masked-language-model head, tied to the embedding."""

    def make(size: Size) -> nn.Module:
        config = transformers.XLMRobertaConfig(
            **(_encoder(size) if size == "tiny" else paper), attn_implementation="sdpa"
        )
        return transformers.XLMRobertaForMaskedLM(config).train()

    return make


class Translator(nn.Module):
    """Vaswani et al., 2017, the base model: words (batch, length) in, logits of the next ones out;
    the sentence to translate is the same one."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(512, width)
        self.layers = nn.Transformer(width, heads, layers, layers, 4 * width, 0.1, batch_first=True)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids) + self.places.weight[: input_ids.shape[1]]
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.layers(x, x, tgt_mask=later, tgt_is_causal=True) @ self.words.weight.T


def make_transformer(size: Size) -> nn.Module:
    """The base model of Vaswani et al., 2017."""
    return Translator(*((TINY_VOCABULARY, 64, 4, 2) if size == "tiny" else (37000, 512, 8, 6)))


def _encoder(size: Size) -> dict[str, int]:
    if size == "paper":
        return {}
    return {
        "vocab_size": TINY_VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "max_position_embeddings": 64,
    }


TINY_LLAMA = {
    "vocab_size": TINY_VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA_1B = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
LLAMA_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}


def make_llama(paper: dict[str, int]) -> Callable[[Size], nn.Module]:
    """A Llama decoder: rotary embedding, grouped-query attention, RMS norm, gated MLP."""

    def make(size: Size) -> nn.Module:
        config = transformers.LlamaConfig(
            **(TINY_LLAMA if size == "tiny" else paper),
            use_cache=False,
            attn_implementation="sdpa",
        )
        return transformers.LlamaForCausalLM(config).train()

    return make


def _language(
    name: str, make: Callable[[Size], nn.Module], *tags: str, padded: bool = False
) -> Family:
    every = frozenset({"transformer", "model-output", *tags})
    return Family(name, make, tokens(padded), logits_loss, every)


FAMILIES: tuple[Family, ...] = (
    _language("gpt2", make_gpt2(0.1), "dropout", "tied"),
    _language("bert", make_bert(0.1), "dropout", "tied", padded=True),
    _language("llama", make_llama(LLAMA_1B)),
)
"""The three language families of the fourteen."""

VARIANTS: tuple[Family, ...] = (
    _language("gpt2_no_dropout", make_gpt2(0.0), "tied"),
    _language("gpt2_medium", make_gpt2(0.1, GPT2_MEDIUM), "dropout", "tied"),
    _language("bert_no_dropout", make_bert(0.0), "tied", padded=True),
    _language("xlm_r", make_xlm_r(XLM_R), "dropout", "tied", padded=True),
    _language("xlm_r_large", make_xlm_r(XLM_R_LARGE), "dropout", "tied", padded=True),
    Family(
        "transformer",
        make_transformer,
        tokens(False),
        class_loss,
        frozenset({"transformer", "dropout"}),
    ),
    _language("llama_7b", make_llama(LLAMA_7B)),
)
"""More of the kind; the tiny size of gpt2_medium is gpt2's, that of llama_7b is llama's."""
