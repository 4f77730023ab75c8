"""`returns="loss"`: outputs that the loss does not read are not returned, and need not be kept."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import memopt
from memopt.errors import ExecutionError, NotReturnedError
from memopt.profiler.estimate import estimate_model
from memopt.step.dropped_outputs import NotReturned, unread
from memopt.step.loss import Loss
from memopt.strategies.monet.strategy import Monet

CLASSES, ROWS = 2000, 64
SCALARS_BYTES = 64
"""The loss and its gradient, which a prediction charges and which may come and go around a peak."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


class WithLoss(nn.Module):
    """A classifier that returns its loss beside its logits, twice, and a mask of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(8, 16), nn.Dropout(0.2)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        scores = self.last(self.drop(self.first(x).relu()))
        loss = nn.functional.cross_entropy(scores, labels)
        return {"loss": loss, "logits": scores, "mask": scores > 0, "more": (scores, 3)}


class WithoutLoss(WithLoss):
    """What it calls its labels picks the scores that it returns."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return super().forward(x, labels)["logits"].gather(1, labels[:, None])


def made() -> tuple[WithLoss, dict[str, Tensor]]:
    torch.manual_seed(0)
    return WithLoss(), {"x": torch.randn(ROWS, 8), "labels": torch.randint(0, CLASSES, (ROWS,))}


def its_loss(output: Any) -> Tensor:
    found: Tensor = output["loss"]
    return found


def exactly(model: nn.Module, plan: memopt.Plan, inputs: Any, module: nn.Module) -> None:
    """Gradients and loss are the unplanned model's, bit for bit, and the peak is as predicted."""
    twin = copy.deepcopy(model)
    losses = []
    for one in (module, twin):
        torch.manual_seed(1)
        losses.append(one(**inputs)["loss"])
        losses[-1].backward()
    assert torch.equal(*losses)
    found = dict(module.named_parameters())
    for name, parameter in twin.named_parameters():
        assert torch.equal(found[name].grad, parameter.grad), name  # type: ignore[arg-type]  # there
    module.zero_grad()
    found_peak = plan.check(model, inputs, loss_fn=its_loss).measured_peak_bytes
    assert 0 <= plan.peak_bytes - found_peak <= SCALARS_BYTES


def test_what_the_loss_does_not_read_is_neither_kept_nor_returned(tmp_path: Path) -> None:
    model, inputs = made()
    whole, alone = (
        memopt.plan(model, inputs, budget="min", loss_fn=its_loss, returns=returns, progress=False)
        for returns in ("all", "loss")
    )
    assert whole.peak_bytes - alone.peak_bytes >= ROWS * CLASSES * 4
    assert alone.baseline.peak_bytes < whole.baseline.peak_bytes
    assert any("3 outputs that the loss does not read" in note for note in alone.notes)
    module = alone.apply(model)
    exactly(model, alone, inputs, module)
    alone.save(tmp_path / "plan")
    exactly(model, alone, inputs, memopt.load(tmp_path / "plan").apply(model))
    output = module(**inputs)
    assert list(output) == ["loss", "logits", "mask", "more"]
    assert output["more"][1] == 3
    for value in (output["logits"], output["mask"], output["more"][0]):
        with pytest.raises(NotReturnedError, match='returns="all"'):
            value.argmax(-1)
    with torch.no_grad():
        assert module(**inputs)["logits"].shape == (ROWS, CLASSES)
    model.eval()
    assert module(**inputs)["mask"].dtype is torch.bool


def test_other_calls_are_planned_again_as_this_one() -> None:
    model, inputs = made()
    plan = memopt.plan(model, inputs, loss_fn=its_loss, returns="loss", progress=False)
    module = plan.apply(model, on_mismatch="plan")
    output = module(**{name: value[:8] for name, value in inputs.items()})
    assert isinstance(output["logits"], NotReturned)
    output["loss"].backward()


def test_wrapped_models_with_labels_know_their_loss() -> None:
    model, inputs = made()

    def loss(output: Any) -> Tensor:
        value: Tensor = (output["loss"] * output["mask"].float().mean()).square()
        return value

    with pytest.raises(ValueError, match="returns no loss"):
        memopt.plan(WithoutLoss(), inputs, returns="loss", progress=False)
    with pytest.raises(ValueError, match="returns no loss"):
        memopt.wrap(WithoutLoss(), "min", returns="loss", progress=False)(**inputs)
    wrapped = memopt.wrap(model, "min", loss_fn=loss, returns="loss", progress=False)
    output = wrapped(**inputs)
    assert isinstance(output["logits"], NotReturned)
    assert output["mask"].dtype is torch.bool  # which the loss reads
    loss(output).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="needs to know the loss"):
        memopt.plan(nn.Linear(2, 2), torch.randn(3, 2), returns="loss", progress=False)
    with pytest.raises(ValueError, match="got 'logits'"):
        memopt.wrap(nn.Linear(2, 2), returns="logits")  # type: ignore[arg-type]


def test_an_estimate_sees_the_same() -> None:
    model, inputs = made()
    device = memopt.Device(flops_per_s={"float32": 1e9})
    found = estimate_model(model, inputs, device, loss=Loss(its_loss, alone=True))
    assert found.record is not None
    assert found.record.output_gradients.dropped == (1, 2, 3)


USES: list[Callable[[Any], Any]] = [
    lambda x: x.shape, lambda x: x + 1, lambda x: 1 - x, lambda x: torch.ones(2) * x, len, list,
    lambda x: x[0], lambda x: torch.softmax(x, -1), lambda x: nn.functional.relu(x), bool, float,
    lambda x: x == 3, lambda x: operator.matmul(torch.ones(2, 2), x), lambda x: torch.stack([x]),
    lambda x: setattr(x, "grad", None), lambda x: x.__array__(),
]  # fmt: skip


@pytest.mark.parametrize("use", range(len(USES)))
def test_every_use_is_one_clear_error(use: int) -> None:
    with pytest.raises(ExecutionError, match=r'output 4 .* planned with returns="loss"'):
        USES[use](NotReturned(4))


def test_libraries_that_look_for_tensors_pass_over_it() -> None:
    one = NotReturned(1)
    assert not hasattr(one, "dtype")
    assert not isinstance(one, Tensor)
    assert "was not returned" in repr(copy.deepcopy([one]))
    assert pytree.tree_leaves({"a": one})[0] is one


def reads(loss: Callable[[Any], Any]) -> tuple[int, ...]:
    leaves, spec = pytree.tree_flatten((torch.ones(2), torch.arange(3), torch.zeros(2), 5))
    return unread(loss, leaves, spec, (0,), torch.equal)


def test_what_a_loss_reads() -> None:
    assert reads(lambda o: o[0].sum()) == (1, 2)
    assert reads(lambda o: o[0].sum() + o[1].sum()) == (2,)
    assert reads(lambda o: torch.dot(o[0], o[2])) == (1,)
    assert reads(lambda o: o[0].sum() * (2 if hasattr(o[2], "dtype") else 1)) == (1,)
    with pytest.raises(ValueError, match='returns="all"'):
        reads(lambda o: o[0].sum() * (2 if isinstance(o[2], Tensor) else 1))


def language_model(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small causal language model with labels."""
    import transformers

    torch.manual_seed(0)
    common = {"vocab_size": CLASSES, "attn_implementation": "sdpa"}
    if name == "GPT2":
        sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                 "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    head = {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")
    config = getattr(transformers, f"{name}Config")(**common, **sizes)
    ids = torch.randint(0, CLASSES, (2, 32))
    return getattr(transformers, head)(config).train(), {"input_ids": ids, "labels": ids}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen2", "GPT2", "Llama"])
def test_language_models_are_exact_and_smaller(name: str) -> None:
    model, inputs = language_model(name)
    least = [
        memopt.plan(model, inputs, budget="min", returns=returns, loss_fn=its_loss, progress=False)
        for returns in ("all", "loss")
    ]
    assert least[0].peak_bytes - least[1].peak_bytes >= 0.9 * 64 * CLASSES * 4
    assert model(**inputs).logits.dim() == 3
    module = least[1].apply(model)
    exactly(model, least[1], inputs, module)
    output = module(**inputs)
    assert output.loss is output["loss"] is output[0]
    with pytest.raises(NotReturnedError):
        output.logits.float()


@pytest.mark.slow
def test_the_cross_entropy_in_chunks_needs_no_logits() -> None:
    model, inputs = language_model("Qwen2")
    inputs = {name: value.repeat(4, 1) for name, value in inputs.items()}
    logits_bytes = 4 * 64 * CLASSES * 4
    strategy = Monet(exact_only=False)
    plan = memopt.plan(
        model,
        inputs,
        budget="min",
        strategy=strategy,
        returns="loss",
        progress=False,
    )
    budget = plan.resident_bytes + logits_bytes
    plan = memopt.plan(
        model, inputs, budget=budget, strategy=strategy, returns="loss", progress=False
    )
    assert "chunked" in {run.implementation for _, run in plan.program.computes}
    measured = plan.check(model, inputs, loss_fn=its_loss).measured_peak_bytes
    assert 0 <= plan.peak_bytes - measured <= SCALARS_BYTES


@pytest.mark.slow
def test_a_trainer_trains_the_same(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from memopt.integrations.hugging_face import MemoptCallback

    logs = []
    for callbacks in ([], [MemoptCallback("min", returns="loss")]):
        model, inputs = language_model("GPT2")
        rows = [{name: value[i % 2] for name, value in inputs.items()} for i in range(20)]
        arguments = TrainingArguments(
            str(tmp_path / "out"), max_steps=5, per_device_train_batch_size=4, logging_steps=1,
            report_to=[], disable_tqdm=True, save_strategy="no", eval_strategy="steps",
            eval_steps=2, use_cpu=True, seed=3,
        )  # fmt: skip
        trainer = Trainer(
            model, arguments, train_dataset=rows, eval_dataset=rows[:4], callbacks=callbacks
        )
        trainer.train()
        seen = [
            {k: v for k, v in row.items() if k in ("loss", "grad_norm", "eval_loss")}
            for row in trainer.state.log_history
        ]
        logs.append((seen, [p.detach().clone() for p in model.parameters()]))
        for callback in callbacks:
            assert callback.calls.planned == 5
    assert logs[0][0] == logs[1][0]
    assert all(map(torch.equal, logs[0][1], logs[1][1]))


@pytest.mark.parametrize("kind", [WithLoss, WithoutLoss])
def test_labels_that_are_for_something_else(kind: type[WithLoss]) -> None:
    """The loss may be in a dict; where there is none, any loss is planned for."""
    _, inputs = made()
    torch.manual_seed(0)
    model = kind()
    twin = copy.deepcopy(model)
    memopt.wrap(model, "min", progress=False)
    gradients = []
    for one in (model, twin):
        torch.manual_seed(1)
        output = one(**inputs)
        (its_loss(output) if kind is WithLoss else output.square().mean()).backward()
        gradients.append([p.grad for p in one.parameters()])
    assert model.calls.planned == 1
    assert all(map(torch.equal, *gradients))
