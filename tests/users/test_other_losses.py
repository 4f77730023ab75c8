"""Loops that call a model with labels and train with something else than the loss it returns, and
with masks and checkpointing as trainers set them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

import memopt
from memopt.integrations.hugging_face import MemoptCallback


def llama(**more: Any) -> nn.Module:
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100,
        intermediate_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        **more,
    )
    return transformers.LlamaForCausalLM(config).train()


def batch(padded: bool = False) -> dict[str, Tensor]:
    ids = torch.randint(0, 100, (3, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 8:] = int(not padded)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def steps(
    model: nn.Module, loss_of: Callable[[Any], Tensor], batches: list[dict[str, Tensor]]
) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for one in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(**one))
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)]
        optimizer.step()
    return found


def of_logits(output: Any) -> Tensor:
    return output.logits.float().logsumexp(-1).mean()


def both(output: Any) -> Tensor:
    return of_logits(output) + output.loss


@pytest.mark.parametrize("loss_of", [of_logits, both])
def test_the_loss_may_come_from_other_outputs(loss_of: Callable[[Any], Tensor]) -> None:
    model = llama(attention_dropout=0.1)
    reference, batches = copy.deepcopy(model), [batch()] * 3
    memopt.wrap(model, "min", "rotor")
    torch.manual_seed(0)
    got = steps(model, loss_of, batches)
    torch.manual_seed(0)
    assert all(map(torch.equal, got, steps(reference, loss_of, batches)))
    assert (model.calls.planned, model.calls.original) == (3, 0)


class Contrastive(nn.Module):
    """CLIP-like: two encoders, and a loss of its own that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor, return_loss: bool = False) -> dict[str, Tensor]:
        likeness = self.one(x) @ self.other(x).t()
        found = {"of_one": likeness, "of_other": likeness.t()}
        if return_loss:
            found["loss"] = torch.nn.functional.cross_entropy(found["of_other"], torch.arange(5))
        return found


def test_a_loss_is_asked_for_without_labels() -> None:
    model = Contrastive()
    reference, batches = copy.deepcopy(model), [{"x": torch.randn(5, 6), "return_loss": True}] * 2
    memopt.wrap(model, "min", "rotor", progress=False)
    got, expected = (steps(one, lambda out: out["loss"], batches) for one in (model, reference))
    assert all(map(torch.equal, got, expected))
    assert (model.calls.planned, model.calls.original) == (2, 0)


class Pooled(nn.Module):
    """An encoder whose pooled output's gradient is laid out as that of its hidden states is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8))
        self.pool = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.layers(x)
        return {"hidden": hidden, "pooled": self.pool(hidden.transpose(0, 1)).tanh()}


def of_pooled(output: Any) -> Tensor:
    return output["pooled"].float().square().mean()


def pooled_steps(number: int, losses: list[Callable[[Any], Tensor]]) -> tuple[nn.Module, list[str]]:
    """A model that is trained, wrapped and as it is, with these losses by turns, with the same
    bits; what memopt warned of."""
    model = Pooled()
    reference = copy.deepcopy(model)
    memopt.wrap(model, "min", "rotor", progress=False)
    batches = [{"x": torch.randn(4, 6, 8)} for _ in range(number)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step, one in enumerate(batches):
            loss_of = losses[step % len(losses)]
            got, expected = (steps(each, loss_of, [one]) for each in (model, reference))
            assert all(map(torch.equal, got, expected))
    return model, [str(one.message) for one in told]


def test_a_loss_of_some_outputs_is_planned_for_from_the_second_step_on() -> None:
    """Its first step runs unplanned where a profile meters the loss: nothing can be measured."""
    model, told = pooled_steps(3, [of_pooled])
    assert sum("begins at some of its outputs only" in one for one in told) == 1
    assert (model.calls.planned, model.calls.original) == (2, 1)


def test_losses_of_some_and_of_all_outputs_take_turns() -> None:
    """Where a plan for all has no backward for some, no plan is made for these time and again."""

    def of_all(output: Any) -> Tensor:
        return of_pooled(output) + output["hidden"].float().square().mean()

    model, told = pooled_steps(6, [of_pooled, of_all])
    assert (model.calls.planned, model.calls.original) == (2, 4)
    assert any("or uses other outputs than so far" in one for one in told)


def test_losses_take_turns() -> None:
    """The third is met while the second is metered, by a profile that no planning could share."""
    model = llama()
    reference, batches = copy.deepcopy(model), [batch()]
    memopt.wrap(model, "min", "rotor")
    for loss_of in (lambda output: output.loss, of_logits):
        got = steps(model, loss_of, batches)
        assert all(map(torch.equal, got, steps(reference, loss_of, batches)))
    with pytest.warns(UserWarning, match="not the `loss` in its output"):
        got = steps(model, both, batches)
    assert all(map(torch.equal, got, steps(reference, both, batches)))
    assert (model.calls.planned, model.calls.original) == (2, 1)


def test_several_calls_before_the_first_backward() -> None:
    model = llama()
    reference = copy.deepcopy(model)
    memopt.wrap(model, "min", "rotor")
    for one in (model, reference):
        losses = [of_logits(one(**batch())) for _ in range(2)]
        for loss in losses:
            loss.backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    assert (model.calls.planned, model.calls.original) == (2, 0)


def test_outputs_may_be_changed_in_place() -> None:
    def changing(output: Any) -> Tensor:
        output.logits.mul_(0.5)
        loss: Tensor = output.loss.mul_(2)
        return of_logits(output) + loss

    model = llama()
    reference = copy.deepcopy(model)
    memopt.wrap(model, "min", "rotor")
    got, expected = (steps(one, changing, [batch()] * 2) for one in (model, reference))
    assert all(map(torch.equal, got, expected))


def test_a_named_loss_still_refuses_other_outputs() -> None:
    model = llama()
    memopt.wrap(model, "min", "rotor", loss_fn=lambda output: output.loss)
    with pytest.raises(memopt.ExecutionError, match="does not use it"):
        steps(model, of_logits, [batch()])


def test_masks_of_ones_are_dropped_as_eager_drops_them() -> None:
    """Under a mask, shared keys are repeated, and their gradients rounded before the sum."""
    model = llama()
    reference = copy.deepcopy(model)
    batches = [batch(), batch(padded=True), batch()]
    memopt.wrap(model, "min", "rotor")
    got = steps(model, lambda output: output.loss, batches)
    assert all(map(torch.equal, got, steps(reference, lambda output: output.loss, batches)))
    assert model.calls.planned == 3


@pytest.mark.parametrize("adapted", [False, True])
def test_the_callback_switches_checkpointing_off_and_on_again(
    adapted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = llama()
    model.gradient_checkpointing_enable()
    if adapted:
        model.enable_input_require_grads()
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    reference, settings = copy.deepcopy(model), transformers.TrainingArguments(use_cpu=True)
    hooks = [dict(m._forward_hooks) for m in model.modules()]
    callback = MemoptCallback("min")
    callback.on_train_begin(settings, None, None, model=model)
    assert caplog.text.count("gradient_checkpointing is switched off") == 1
    got = steps(model, lambda output: output.loss, [batch()] * 2)
    assert callback.calls.planned == 2
    state, logs = transformers.TrainerState(log_history=[{"loss": 1.0}]), {"loss": 1.0}
    for _ in range(2):
        callback.on_log(settings, state, None, logs=logs)  # type: ignore[arg-type]
    lines = "; ".join(callback.plans.lines)
    assert logs == state.log_history[0] == {"loss": 1.0, "memopt": lines}
    callback.on_train_end(settings, None, None, model=model)
    assert callback.plans
    assert [dict(m._forward_hooks) for m in model.modules()] == hooks
    assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = steps(reference, lambda output: output.loss, [batch()] * 2)
    assert all(map(torch.equal, got, expected))
