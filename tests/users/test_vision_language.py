"""Vision-language models, which look at the values of their tokens, train in parts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    GemmaConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    SiglipVisionConfig,
)

from tests.users.test_parts import in_parts, training

IMAGE = 98
_SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
_LAYERS = {**_SIZES, "num_hidden_layers": 2}
_VISION = {**_SIZES, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
_TEXT = {"vocab_size": 100, "num_key_value_heads": 2, "head_dim": 8}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


def llava() -> nn.Module:
    vision, text = CLIPVisionConfig(**_VISION), LlamaConfig(**_LAYERS, **_TEXT)
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1
    )
    return LlavaForConditionalGeneration(config)


def paligemma() -> nn.Module:
    vision = SiglipVisionConfig(**_VISION, projection_dim=16)
    text = GemmaConfig(**_LAYERS, **_TEXT)
    config = PaliGemmaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, projection_dim=16
    )
    return PaliGemmaForConditionalGeneration(config)


def batch(kind: str) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 97, (2, 20), generator=drawn)
    tokens[:, 1:5] = IMAGE
    found = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": torch.randn(2, 3, 28, 28, generator=drawn),
        "labels": tokens.masked_fill(tokens == IMAGE, -100),
    }
    if kind == "paligemma":
        found["token_type_ids"] = (torch.arange(20) > 8).long().expand(2, 20).contiguous()
    return found


@pytest.mark.filterwarnings("ignore:.*Its sub-modules are planned instead")
@pytest.mark.parametrize("kind", ["llava", "paligemma"])
def test_twenty_steps_in_parts_as_without_memopt(kind: str) -> None:
    torch.manual_seed(0)
    plain = {"llava": llava, "paligemma": paligemma}[kind]().train()
    model, inputs = copy.deepcopy(plain), batch(kind)
    given = tuple(inputs.values())

    def loss_of(one: Any) -> torch.Tensor:
        loss: torch.Tensor = one(**inputs).loss
        return loss

    expected, unplanned_bytes = training(plain, 20, 16, loss_of, given)
    in_parts(model, "min")
    losses, most = training(model, 20, 16, loss_of, given)
    assert all(map(torch.equal, losses, expected))
    assert most <= model.memopt.parts.shared.peak_bytes() <= unplanned_bytes
    report = model.memopt.report()
    # PaliGemma hands its language model a cache, inside of which only the layers' MLPs are planned.
    inner = {"llava": "", "paligemma": ".layers.1.mlp"}[kind]
    for part in ("vision_tower", "multi_modal_projector", f"language_model{inner}"):
        assert f"planned: model.{part}: rotor" in report
    assert model.calls.planned == {"llava": 60, "paligemma": 80}[kind]
    assert model.calls.original == 0
