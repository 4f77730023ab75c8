"""Vision-language models, which look at the values of their tokens, train whole and in parts."""

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
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SiglipVisionConfig,
)

import memopt
from memopt.errors import CaptureError
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


SCALARS_BYTES = 64
PARTS = ("model.vision_tower", "model.language_model")


@pytest.mark.parametrize("parts", ["auto", PARTS], ids=["whole", "parts"])
@pytest.mark.parametrize("kind", ["llava", "paligemma"])
def test_twenty_steps_as_without_memopt(kind: str, parts: Any) -> None:
    """The whole is planned with its check of the tokens, or the parts that are named."""
    torch.manual_seed(0)
    plain = {"llava": llava, "paligemma": paligemma}[kind]().train()
    model, inputs = copy.deepcopy(plain), batch(kind)
    given = tuple(inputs.values())

    def loss_of(one: Any) -> torch.Tensor:
        loss: torch.Tensor = one(**inputs).loss
        return loss

    expected, unplanned_bytes = training(plain, 20, 16, loss_of, given)
    if kind == "paligemma" and parts is PARTS:  # it hands its language model a cache
        parts = ("model.vision_tower", "model.language_model.layers.1.mlp")
    in_parts(model, "min", parts=parts)
    losses, most = training(model, 20, 16, loss_of, given)
    assert all(map(torch.equal, losses, expected))
    running = memopt.running(model)
    if parts == "auto":
        (plan,) = running.plans
        # Gradients of the outputs beside the loss are charged, as its summary says, and scalars.
        others = [one for one in plain(**inputs).values() if torch.is_tensor(one) and one.dim()]
        charged_bytes = sum(one.nbytes for one in others) + SCALARS_BYTES
        assert most <= plan.peak_bytes <= unplanned_bytes + charged_bytes
        assert most <= unplanned_bytes
    else:
        assert most <= running.parts.shared.peak_bytes() <= unplanned_bytes
        assert all(f"planned: {part}: rotor" in running.report() for part in parts)
    assert running.calls.planned == 20 * (1 if parts == "auto" else len(parts))
    assert running.calls.original == 0


def test_tokens_that_do_not_match_the_image_are_refused_by_the_model() -> None:
    model, inputs = llava().train(), batch("llava")
    in_parts(model, "min")
    model(**inputs).loss.backward()
    wrong = {**inputs, "input_ids": inputs["input_ids"].clone()}
    wrong["input_ids"][:, 1] = 5
    with pytest.raises(ValueError, match="do not match"), pytest.warns(match="a check in the"):
        model(**wrong)
    assert memopt.running(model).calls.planned == 1


def qwen() -> tuple[Any, dict[str, torch.Tensor]]:
    """A model that computes its tokens' positions out of their kinds, and its batch."""
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "depth": 1, "patch_size": 4,
        "out_hidden_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    text = {**_LAYERS, **_TEXT, "rope_parameters": rope, "use_cache": False}
    config = Qwen3VLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE)
    inputs = batch("qwen")
    inputs["pixel_values"] = torch.randn(32, 96, generator=torch.Generator().manual_seed(0))
    inputs["image_grid_thw"] = torch.tensor([[1, 4, 4], [1, 4, 4]])
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).int()
    torch.manual_seed(0)
    return Qwen3VLForConditionalGeneration(config).train(), inputs


def test_positions_that_are_computed_before_the_call() -> None:
    """The refusal of a model that computes them says so."""
    plain, inputs = qwen()
    with pytest.raises(CaptureError, match=r"get_rope_index before.*position_ids"):
        memopt.plan(plain, inputs, progress=False)
    del inputs["attention_mask"]  # of ones
    kinds, grid = inputs["mm_token_type_ids"], inputs["image_grid_thw"]
    inputs["position_ids"] = plain.model.get_rope_index(inputs["input_ids"], kinds, grid)[0]

    def loss_of(one: Any) -> torch.Tensor:
        loss: torch.Tensor = one(**inputs).loss
        return loss

    model = memopt.wrap(copy.deepcopy(plain), "min", "rotor", progress=False)
    expected, _ = training(plain, 3, loss_of=loss_of)
    losses, _ = training(model, 3, loss_of=loss_of)
    assert all(map(torch.equal, losses, expected))
    assert memopt.running(model).calls.planned == 3
