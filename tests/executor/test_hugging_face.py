"""Hugging Face's decoders as eager runs them: causal attention, keys and values not repeated."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from tests.zoo import torchvision_shim

IDS = torch.randint(0, 300, (2, 32), generator=torch.manual_seed(0))
HALVES = torch.cat([torch.arange(16), torch.arange(16)])[None].repeat(2, 1)


class Loss(nn.Module):
    """The loss alone; `positions` say where one of several packed sequences ends."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, position_ids=positions).loss
        return loss


@pytest.mark.parametrize("inputs", [(IDS,), (IDS, HALVES)], ids=["counted", "packed"])
def test_grouped_keys_are_those_of_eager(inputs: tuple[Tensor, ...]) -> None:
    assert torchvision_shim.__file__  # transformers imports torchvision where it is installed
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    model = Loss(LlamaForCausalLM(config).train())
    twin = copy.deepcopy(model)
    plan = memopt.plan(model, inputs, budget="min", cache=False, progress=False)
    losses: list[Any] = []
    for one in (plan.apply(model), twin):
        losses.append(one(*inputs))
        losses[-1].backward()
    assert torch.equal(*losses)
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)
    assert plan.graph is not None
    names = " ".join(operator.name for operator in plan.graph.operators)
    # The mask of packed sequences is made in the step; without them there is none.
    assert ("cumsum" in names) == (len(inputs) == 2), names


@pytest.mark.parametrize("by_place", [False, True])
def test_masks_that_mask_nothing_are_left_out_as_in_eager(
    by_place: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager sums the gradient of T5's bias of positions over a batch without padding before it
    rounds it to bfloat16, and after that over a batch with padding; masks may come by place."""
    assert torchvision_shim.__file__
    from transformers import T5Config, T5ForConditionalGeneration

    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    config = T5Config(
        vocab_size=300, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
        decoder_start_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config).train()
    twin = copy.deepcopy(model)
    memopt.wrap(model, budget="min", progress=False)
    whole = torch.ones(2, 16, dtype=torch.long)
    padded = whole.clone()
    padded[1, 12:] = 0
    ids, labels = IDS[:, :16].contiguous(), IDS[:, 16:24].contiguous()
    for mask in (whole, padded, whole):
        losses: list[Any] = []
        for one in (model, twin):
            torch.manual_seed(1)
            one.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                if by_place:
                    output = one(ids, mask, labels=labels)
                else:
                    output = one(input_ids=ids, attention_mask=mask, labels=labels)
            output.loss.backward()
            losses.append(output.loss)
        assert torch.equal(*losses)
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(parameter.grad, other.grad)
    assert model.calls.planned == 3
    assert len(model.memopt.plans) == 2


class Masking(nn.Module):
    """Hands a mask on, or computes one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, kept: Tensor | None = None) -> Tensor:
        if kept is None:
            mask = (tokens != 0).long()
        else:  # as PEFT puts a prefix before it
            mask = torch.cat([torch.ones_like(kept[:, :4]), kept[:, 4:]], 1)
        hidden: Tensor = self.model(tokens, attention_mask=mask, use_cache=False).last_hidden_state
        return hidden


class Encoding(Masking):
    """Hands the mask on, and gives an encoder one that it computes."""

    def __init__(self, model: nn.Module, encoder: nn.Module) -> None:
        super().__init__(model)
        self.encoder = encoder

    def forward(self, tokens: Tensor, kept: Tensor | None = None) -> Tensor:
        seen = self.encoder(tokens, attention_mask=(tokens >= 0).long()).last_hidden_state
        hidden: Tensor = super().forward(tokens, kept) + seen
        return hidden


def _sharing() -> nn.Module:
    """A decoder whose queries share keys and values."""
    assert torchvision_shim.__file__
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=8, num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaModel(config)


def test_a_mask_is_left_out_beside_one_of_another_kind_that_the_model_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was kept, and the gradients of keys and values had other last bits."""
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    decoder = _sharing()
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    encoder = BertModel(BertConfig(vocab_size=300, num_attention_heads=4, **sizes))
    model = Encoding(decoder, encoder).train()
    twin = copy.deepcopy(model)
    memopt.wrap(model, budget="min", strategy="rotor", progress=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*attention mask")
        for one in (model, twin):
            torch.manual_seed(1)
            one(IDS, torch.ones_like(IDS)).square().mean().backward()
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert parameter.grad is other.grad is None or torch.equal(parameter.grad, other.grad), name
    assert model.calls.planned == 1


def test_a_plan_of_padded_inputs_says_once_that_a_later_mask_masks_nothing() -> None:
    """Last bits of gradients differed without a word."""
    padded, whole = torch.ones_like(IDS), torch.ones_like(IDS)
    padded[0, -2:] = 0
    model = _sharing().train()
    planned = memopt.plan(model, (IDS, padded), budget="min", progress=False).apply(model)
    with pytest.warns(UserWarning, match="mask of this call masks nothing.*memopt.wrap"):
        planned(IDS, whole)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*attention mask")
        for mask in (padded, whole):
            planned(IDS, mask)
    assert planned.calls.planned == 3


def test_a_plan_that_keeps_a_mask_which_masks_nothing_says_so() -> None:
    model = Masking(_sharing()).train()
    whole = torch.ones_like(IDS)
    with pytest.warns(UserWarning, match="mask of the example masks nothing.*memopt.wrap"):
        memopt.plan(model, (IDS, whole), strategy="store-all", progress=False)
    whole[1, 20:] = 0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*attention mask")
        memopt.plan(model, (IDS, whole), strategy="store-all", progress=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_masks_of_other_names_are_left_out_and_computed_ones_are_warned_of(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    model = Masking(_sharing()).to(dtype).train()
    twin = copy.deepcopy(model)
    memopt.wrap(model, budget="min", progress=False)
    whole = torch.ones_like(IDS)
    padded = whole.clone()
    padded[1, 20:] = 0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the model computes an attention mask")
        for mask in (whole, padded, whole):
            for one in (model, twin):
                one.zero_grad()
                one(IDS, mask).float().square().mean().backward()
            for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.equal(parameter.grad, other.grad)
    assert model.calls.planned == 3
    with pytest.warns(UserWarning, match="the model computes an attention mask"):
        model(IDS).float().square().mean().backward()
    assert model.calls.planned == 4


def test_hidden_states_of_a_model_that_was_never_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their hooks are set at the first call that asks for them, behind a lock."""
    assert torchvision_shim.__file__
    from transformers import GPT2Config, GPT2LMHeadModel

    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    config = GPT2Config(vocab_size=300, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).train()
    twin = copy.deepcopy(model)

    def loss(output: Any) -> Tensor:
        middle: Tensor = output.hidden_states[1]
        distilled: Tensor = output.loss + middle.square().mean()
        return distilled

    memopt.wrap(model, budget="min", loss_fn=loss, progress=False)
    losses: list[Any] = []
    for one in (model, twin):
        torch.manual_seed(1)
        # As it is planned: keys that went through a cache have other strides, with which products
        # are rounded otherwise on some processors.
        output = one(IDS, labels=IDS, output_hidden_states=True, use_cache=False)
        losses.append(loss(output))
        losses[-1].backward()
    assert model.calls.planned == 1
    assert torch.equal(*losses)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    hooks = [len(block._forward_hooks) for block in model.transformer.h]
    assert hooks == [len(block._forward_hooks) for block in twin.transformer.h]
