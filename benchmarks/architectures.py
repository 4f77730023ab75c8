"""Popular architectures of transformers and timm: small models, all else by default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.architecture_inputs import (
    VOCABULARY,
    Inputs,
    captioned,
    class_loss,
    pictures,
    replaced_loss,
    replaced_tokens,
    segmented,
    spectra,
    spoken_loss,
    tokens,
    waves,
    without_labels,
)
from tests.zoo import torchvision_shim  # noqa: F401 (before timm)

import timm  # isort: skip


@dataclass(frozen=True)
class Architecture:
    """A model and its inputs.

    Attributes:
        name: for --only.
        kind: of the model.
        model: makes it.
        inputs: makes a micro-batch.
        loss: the loss of the model's output; None: the output holds it.
        remedy: the same as the refusal advises it, named by that.
    """

    name: str
    kind: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    loss: Callable[[Any], Tensor] = lambda output: output.loss
    remedy: Architecture | None = None


TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = {**TINY, "num_key_value_heads": 2, "max_position_embeddings": 64}
SEQUENCES = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def made(config: str, model: str, **sizes: Any) -> nn.Module:
    """A transformers model."""
    built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    return built


def _language(
    name: str, kind: str, family: str, head: str, labels: str = "tokens", **sizes: Any
) -> Architecture:
    model = partial(made, f"{family}Config", f"{family}For{head}", **sizes)
    return Architecture(name, kind, model, partial(tokens, labels))


def _clip() -> nn.Module:
    text = {key: value for key, value in TINY.items() if key != "num_hidden_layers"}
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        text_config={**text, "num_hidden_layers": 2},
        vision_config={**vision, "intermediate_size": 64, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    return transformers.CLIPModel(config)


def _wav2vec2(**settings: Any) -> nn.Module:
    return made("Wav2Vec2Config", "Wav2Vec2ForCTC", **WAVES, **settings)


def _plain_wav2vec2() -> nn.Module:
    model: Any = _wav2vec2(layerdrop=0.0, apply_spec_augment=False)
    model.wav2vec2.feature_extractor._requires_grad = False
    plain: nn.Module = model
    return plain


VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
WAVES = {
    **TINY,
    "vocab_size": 32,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 4, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}

TRANSFORMERS = (
    Architecture(
        "GPT-2",
        "decoder",
        partial(
            made,
            "GPT2Config",
            "GPT2LMHeadModel",
            vocab_size=VOCABULARY,
            n_layer=2,
            n_embd=32,
            n_head=4,
            bos_token_id=1,
            eos_token_id=2,
        ),
        tokens,
    ),
    _language("Llama", "decoder", "Llama", "CausalLM", **DECODER),
    _language("Mistral", "decoder", "Mistral", "CausalLM", **DECODER),
    _language("Qwen2", "decoder", "Qwen2", "CausalLM", **DECODER),
    _language("Qwen3", "decoder", "Qwen3", "CausalLM", **DECODER, head_dim=8),
    _language("Gemma2", "decoder", "Gemma2", "CausalLM", **DECODER, head_dim=8),
    Architecture(
        "Gemma3",
        "decoder",
        partial(made, "Gemma3TextConfig", "Gemma3ForCausalLM", **DECODER, head_dim=8),
        tokens,
    ),
    _language("Phi-3", "decoder", "Phi3", "CausalLM", **DECODER),
    _language(
        "OPT",
        "decoder",
        "OPT",
        "CausalLM",
        **{key: value for key, value in TINY.items() if key != "intermediate_size"},
        ffn_dim=64,
        word_embed_proj_dim=32,
        max_position_embeddings=64,
    ),
    _language(
        "BLOOM",
        "decoder",
        "Bloom",
        "CausalLM",
        vocab_size=VOCABULARY,
        hidden_size=32,
        n_layer=2,
        n_head=4,
    ),
    _language("Falcon", "decoder", "Falcon", "CausalLM", **TINY),
    _language(
        "T5",
        "encoder-decoder",
        "T5",
        "ConditionalGeneration",
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    _language("BART", "encoder-decoder", "Bart", "ConditionalGeneration", **SEQUENCES),
    _language("BERT", "encoder", "Bert", "SequenceClassification", "texts", **TINY),
    _language("RoBERTa", "encoder", "Roberta", "MaskedLM", **TINY),
    _language(
        "DistilBERT",
        "encoder",
        "DistilBert",
        "SequenceClassification",
        "texts",
        vocab_size=VOCABULARY,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=64,
    ),
    Architecture(
        "ELECTRA",
        "encoder",
        partial(made, "ElectraConfig", "ElectraForPreTraining", **TINY, embedding_size=16),
        replaced_tokens,
        remedy=Architecture(
            "ELECTRA without labels",
            "encoder",
            partial(made, "ElectraConfig", "ElectraForPreTraining", **TINY, embedding_size=16),
            lambda: without_labels(replaced_tokens()),
            replaced_loss,
        ),
    ),
    _language("DeBERTa-v2", "encoder", "DebertaV2", "SequenceClassification", "texts", **TINY),
    Architecture(
        "ViT",
        "vision",
        partial(made, "ViTConfig", "ViTForImageClassification", **VISION),
        pictures,
    ),
    Architecture(
        "Wav2Vec2",
        "audio",
        _wav2vec2,
        waves,
        remedy=Architecture(
            "Wav2Vec2 so set, without labels",
            "audio",
            _plain_wav2vec2,
            lambda: without_labels(waves()),
            spoken_loss,
        ),
    ),
    Architecture(
        "Whisper",
        "audio",
        partial(
            made,
            "WhisperConfig",
            "WhisperForConditionalGeneration",
            **SEQUENCES,
            max_source_positions=32,
            max_target_positions=32,
        ),
        spectra,
    ),
    Architecture("CLIP", "vision and text", _clip, captioned),
    _language(
        "Mamba",
        "decoder",
        "Mamba",
        "CausalLM",
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=8,
    ),
    _language(
        "Mixtral",
        "decoder",
        "Mixtral",
        "CausalLM",
        **DECODER,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    _language("ModernBERT", "encoder", "ModernBert", "MaskedLM", **TINY, cls_token_id=1),
    Architecture(
        "Swin",
        "vision",
        partial(
            made,
            "SwinConfig",
            "SwinForImageClassification",
            image_size=32,
            patch_size=4,
            embed_dim=16,
            depths=[1, 1],
            num_heads=[2, 2],
            window_size=4,
        ),
        pictures,
    ),
    Architecture(
        "SegFormer",
        "vision",
        partial(
            made,
            "SegformerConfig",
            "SegformerForSemanticSegmentation",
            hidden_sizes=[8, 16, 16, 16],
            depths=[1, 1, 1, 1],
            num_attention_heads=[1, 2, 2, 2],
            decoder_hidden_size=16,
            num_labels=2,
        ),
        segmented,
    ),
    Architecture(
        "FocalNet",
        "vision",
        partial(
            made,
            "FocalNetConfig",
            "FocalNetForImageClassification",
            image_size=32,
            embed_dim=8,
            depths=[1, 1, 1, 1],
        ),
        pictures,
    ),
)
"""Two layers each, 32 wide; all else as in the default configuration."""


def _images(name: str, pixels: int = 64, **sizes: Any) -> Architecture:
    return Architecture(
        name,
        "vision",
        partial(timm.create_model, name, num_classes=10, **sizes),
        lambda: {"x": torch.randn(4, 3, pixels, pixels)},
        class_loss,
    )


TIMM = (
    _images("resnet18"),
    _images("efficientnet_b0"),
    _images("convnext_atto"),
    _images("vit_tiny_patch16_224", img_size=64),
    _images("swin_tiny_patch4_window7_224", img_size=64, window_size=4),
    _images("mobilenetv3_small_100"),
    _images("regnety_002"),
    _images("densenet121"),
    _images("mixer_s32_224", img_size=64),
    _images("deit_tiny_patch16_224", img_size=64),
    _images("levit_128s", 224),
    _images("coatnet_nano_rw_224", img_size=64),
    _images("maxvit_tiny_tf_224", img_size=64),
    _images("resnest14d"),
    _images("edgenext_xx_small"),
    _images("fastvit_t8"),
)
"""Whole models for ten classes of small images."""

ARCHITECTURES = (*TRANSFORMERS, *TIMM)
