"""Popular architectures of transformers and timm: small models, all else by default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo import torchvision_shim  # noqa: F401 (before timm)

import timm  # isort: skip

VOCABULARY = 128
Inputs = dict[str, Any]


def tokens(labels: str = "tokens") -> Inputs:
    """Make padded texts, with a label for each token or for each text."""
    ids = torch.randint(3, VOCABULARY, (2, 16))
    mask = torch.ones_like(ids)
    mask[-1, -4:] = 0
    wanted = ids.masked_fill(mask == 0, -100) if labels == "tokens" else torch.randint(2, (2,))
    return {"input_ids": ids, "attention_mask": mask, "labels": wanted}


def _images(pixels: int, **labels: Tensor) -> Inputs:
    return {"pixel_values": torch.randn(2, 3, pixels, pixels), **labels}


def _pictures() -> Inputs:
    return _images(32, labels=torch.randint(2, (2,)))


def _segmented() -> Inputs:
    return _images(64, labels=torch.randint(2, (2, 64, 64)))


def _replaced_tokens() -> Inputs:
    """Make what ELECTRA discriminates: for each token, whether it was replaced."""
    return tokens() | {"labels": torch.randint(2, (2, 16))}


def _waves() -> Inputs:
    return {"input_values": torch.randn(2, 4000), "labels": torch.randint(1, 32, (2, 4))}


def _spectra() -> Inputs:
    words = torch.randint(3, VOCABULARY, (2, 8))
    return {"input_features": torch.randn(2, 80, 64), "labels": words}


def _captioned() -> Inputs:
    return _unlabelled(tokens) | _unlabelled(_pictures) | {"return_loss": True}


def _unlabelled(inputs: Callable[[], Inputs]) -> Inputs:
    """Make the inputs of a model whose loss is computed outside."""
    return {name: value for name, value in inputs().items() if name != "labels"}


def class_loss(output: Tensor) -> Tensor:
    """Give the cross entropy with random classes."""
    return functional.cross_entropy(output, torch.randint(output.shape[-1], output.shape[:1]))


@dataclass(frozen=True)
class Architecture:
    """A model, its inputs (a micro-batch) and the loss of its output.

    Attributes:
        remedy: the same as the refusal advises it, named by that.
    """

    name: str
    kind: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    loss: Callable[[Any], Tensor] = lambda output: output.loss
    remedy: Architecture | None = None


# fmt: off
TINY = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
DECODER = {**TINY, "num_key_value_heads": 2, "max_position_embeddings": 64}
SEQUENCES = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 32, "patch_size": 8,
}
WAVES = {
    **TINY, "vocab_size": 32, "conv_dim": (16, 16, 16), "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 4, 4), "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}
# fmt: on


def made(config: str, model: str, **sizes: Any) -> nn.Module:
    """Build a transformers model."""
    built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    return built


def _model(
    name: str,
    kind: str,
    family: str,
    head: str,
    inputs: Callable[[], Inputs] = tokens,
    **sizes: Any,
) -> Architecture:
    return Architecture(
        name, kind, partial(made, f"{family}Config", family + head, **sizes), inputs
    )


def _clip() -> nn.Module:
    config = transformers.CLIPConfig(text_config=TINY, vision_config=VISION, projection_dim=16)
    return transformers.CLIPModel(config)


def _plain_wav2vec2() -> nn.Module:
    settings: Any = {"layerdrop": 0.0, "apply_spec_augment": False}
    model: Any = made("Wav2Vec2Config", "Wav2Vec2ForCTC", **WAVES, **settings)
    model.wav2vec2.feature_extractor._requires_grad = False
    plain: nn.Module = model
    return plain


_CAUSAL, _CLASSES, _WORDS = "ForCausalLM", "ForSequenceClassification", "ForMaskedLM"
_SEQUENCE, _IMAGES = "ForConditionalGeneration", "ForImageClassification"
_texts = partial(tokens, "texts")
_words = {"vocab_size": VOCABULARY}
_gemma3 = partial(made, "Gemma3TextConfig", "Gemma3ForCausalLM", **DECODER, head_dim=8)
# fmt: off
TRANSFORMERS = (
    _model("GPT-2", "decoder", "GPT2", "LMHeadModel", **_words, n_layer=2, n_embd=32, n_head=4,
              bos_token_id=1, eos_token_id=2),
    _model("Llama", "decoder", "Llama", _CAUSAL, **DECODER),
    _model("Mistral", "decoder", "Mistral", _CAUSAL, **DECODER),
    _model("Qwen2", "decoder", "Qwen2", _CAUSAL, **DECODER),
    _model("Qwen3", "decoder", "Qwen3", _CAUSAL, **DECODER, head_dim=8),
    _model("Gemma2", "decoder", "Gemma2", _CAUSAL, **DECODER, head_dim=8),
    Architecture("Gemma3", "decoder", _gemma3, tokens),
    _model("Phi-3", "decoder", "Phi3", _CAUSAL, **DECODER),
    _model("OPT", "decoder", "OPT", _CAUSAL,
           **{key: size for key, size in TINY.items() if key != "intermediate_size"}, ffn_dim=64,
           word_embed_proj_dim=32, max_position_embeddings=64),
    _model("BLOOM", "decoder", "Bloom", _CAUSAL, **_words, hidden_size=32, n_layer=2, n_head=4),
    _model("Falcon", "decoder", "Falcon", _CAUSAL, **TINY),
    _model("T5", "encoder-decoder", "T5", _SEQUENCE, **_words, d_model=32, d_kv=8, d_ff=64,
              num_layers=2, num_heads=4, decoder_start_token_id=0),
    _model("BART", "encoder-decoder", "Bart", _SEQUENCE, **SEQUENCES),
    _model("BERT", "encoder", "Bert", _CLASSES, _texts, **TINY),
    _model("RoBERTa", "encoder", "Roberta", _WORDS, **TINY),
    _model("DistilBERT", "encoder", "DistilBert", _CLASSES, _texts, **_words, dim=32,
              n_layers=2, n_heads=4, hidden_dim=64),
    _model("ELECTRA", "encoder", "Electra", "ForPreTraining", _replaced_tokens, **TINY,
              embedding_size=16),
    _model("DeBERTa-v2", "encoder", "DebertaV2", _CLASSES, _texts, **TINY),
    _model("ViT", "vision", "ViT", _IMAGES, _pictures, **VISION),
    Architecture(
        "Wav2Vec2", "audio", partial(made, "Wav2Vec2Config", "Wav2Vec2ForCTC", **WAVES), _waves,
        remedy=Architecture("Wav2Vec2 so set", "audio", _plain_wav2vec2, _waves)),
    _model("Whisper", "audio", "Whisper", _SEQUENCE, _spectra, **SEQUENCES,
           max_source_positions=32, max_target_positions=32),
    Architecture("CLIP", "vision and text", _clip, _captioned),
    _model("Mamba", "decoder", "Mamba", _CAUSAL, **_words, hidden_size=32, num_hidden_layers=2,
              state_size=8),
    _model("Mixtral", "decoder", "Mixtral", _CAUSAL, **DECODER, num_local_experts=4,
              num_experts_per_tok=2),
    _model("ModernBERT", "encoder", "ModernBert", _WORDS, **TINY, cls_token_id=1),
    _model("Swin", "vision", "Swin", _IMAGES, _pictures, image_size=32, patch_size=4, embed_dim=16,
           depths=[1, 1], num_heads=[2, 2], window_size=4),
    _model("SegFormer", "vision", "Segformer", "ForSemanticSegmentation", _segmented,
           hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 2],
           decoder_hidden_size=16, num_labels=2),
    _model("FocalNet", "vision", "FocalNet", _IMAGES, _pictures, image_size=32, embed_dim=8,
           depths=[1, 1, 1, 1]),
)
# fmt: on
"""Two layers each, 32 wide; all else as in the default configuration."""


def _timm(name: str, pixels: int = 64, **sizes: Any) -> Architecture:
    return Architecture(
        name,
        "vision",
        partial(timm.create_model, name, num_classes=10, **sizes),
        lambda: {"x": torch.randn(4, 3, pixels, pixels)},
        class_loss,
    )


TIMM = (
    _timm("resnet18"),
    _timm("efficientnet_b0"),
    _timm("convnext_atto"),
    _timm("vit_tiny_patch16_224", img_size=64),
    _timm("swin_tiny_patch4_window7_224", img_size=64, window_size=4),
    _timm("mobilenetv3_small_100"),
    _timm("regnety_002"),
    _timm("densenet121"),
    _timm("mixer_s32_224", img_size=64),
    _timm("deit_tiny_patch16_224", img_size=64),
    _timm("levit_128s", 224),
    _timm("coatnet_nano_rw_224", img_size=64),
    _timm("maxvit_tiny_tf_224", img_size=64),
    _timm("resnest14d"),
    _timm("edgenext_xx_small"),
    _timm("fastvit_t8"),
)
"""Whole models for ten classes of small images."""
ARCHITECTURES = (*TRANSFORMERS, *TIMM)
