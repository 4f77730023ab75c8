"""What a forward does in Python beside its tensors is named, and the remedy works."""

from __future__ import annotations

import contextvars
import functools
import gc
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.capture.capture import capture
from memopt.errors import CaptureError, GuardError
from memopt.step.inputs import to_call

Form = Callable[["Net", Tensor], Any]
QUIET: dict[str, Any] = {"budget": "min", "progress": False, "cache": False}
KEPT: list[Any] = []
DEPTH: contextvars.ContextVar[int] = contextvars.ContextVar("depth", default=1)
RATE = {"rate": 1.0}
LOCAL = threading.local()


class Twice(torch.autograd.Function):
    """Keeps its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        KEPT.append(gradient)
        return gradient * 2


class Timer:
    """A context that a trace enters only where it makes it."""

    def __enter__(self) -> None:
        KEPT.append("entered")

    def __exit__(self, *_: object) -> None:
        KEPT.append("left")


def counter(_x: Tensor) -> None:
    counter.calls = 1  # type: ignore[attr-defined]


@torch.compiler.disable
def aside(x: Tensor) -> Tensor:
    return x * 2


aside_as_one = memopt.opaque(aside)


def kept(x: Tensor) -> Tensor:
    KEPT.append("ran")
    return x.sin()


class Net(nn.Module):
    timer, lock = Timer(), threading.Lock()

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.linear = nn.Linear(3, 3)
        self.usage, self.numbers = np.zeros(2), iter([])
        self.numbers = (n / 2 for n in range(9))
        self.register_buffer("used", torch.zeros(2))

    @functools.cached_property
    def table(self) -> Tensor:
        return torch.ones(3)

    def forward(self, x: Tensor) -> Any:
        y: Tensor = self.linear(self.form(self, torch.tanh(self.linear(x))))
        return y

    def within(self, context: Any, h: Tensor) -> Tensor:
        with context:
            return h.sin()

    def after(self, _done: Any, h: Tensor) -> Tensor:
        return h

    def frozen(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            aside: Tensor = self.linear(h)
        return h + aside

    def appended(self, h: Tensor) -> Tensor:
        KEPT.append("ran")
        return h.sin()

    def used_more(self, h: Tensor) -> Tensor:
        self.usage[0] += h.shape[0]
        return h

    def used_in_tensor(self, h: Tensor) -> Tensor:
        self.used[0] += h.shape[0]
        return h

    def exported(self, h: Tensor) -> Tensor:
        os.environ["MEMOPT_TESTS"] = "1"
        return h


OUTSIDE = "outside of the model"
AROUND = "around the call of the model"
ROWS: dict[str, tuple[Form, str, tuple[Form, ...]]] = {
    "time": (lambda m, h: m.after(time.perf_counter(), h), f"asks for the time, .*{AROUND}", ()),
    "wall time": (lambda m, h: m.after(time.time(), h), f"asks for the time, .*{AROUND}", ()),
    "seed": (lambda m, h: m.after(torch.manual_seed(7), h), f"seeds torch .*{AROUND}", ()),
    "fork": (lambda m, h: m.within(torch.random.fork_rng([]), h), f"seeds torch .*{AROUND}", ()),
    "environment": (Net.exported, rf"sets an environment variable \(os.environ\), .*{OUTSIDE}", ()),
    "thread": (
        lambda m, h: m.after(threading.Thread(target=str), h),
        f"it uses a thread, .*{OUTSIDE}",
        (),
    ),
    "lock": (lambda m, h: m.within(m.lock, h), f"it takes a lock, .*{AROUND}", ()),
    "acquired": (lambda m, h: m.after(m.lock.acquire(), h), f"it takes a lock, .*{AROUND}", ()),
    "now": (lambda m, h: m.after(datetime.now(), h), f"asks for the time, .*{AROUND}", ()),
    "state": (lambda m, h: m.after(torch.get_rng_state(), h), f"seeds torch .*{AROUND}", ()),
    "file": (
        lambda m, h: m.after(Path(os.devnull).read_text(), h),
        f"it opens a file, or .*{OUTSIDE}",
        (),
    ),
    "text": (lambda m, h: m.after(str(h), h), f"makes a text of a tensor's values.*{OUTSIDE}", ()),
    "standard output": (
        lambda m, h: m.after(sys.__stdout__.flush(), h),
        "it prints, logs or warns, .*in the training loop",
        (),
    ),
    "copy": (lambda m, h: deepcopy(h), r"clone\(\)", (lambda m, h: h.clone(),)),
    "node": (lambda m, h: m.after(h.grad_fn, h), r"it reads \.grad_fn", ()),
    "hooks": (
        lambda m, h: m.after(m.linear.register_forward_hook(print), h),
        "sets a hook on a module .*once, before planning",
        (),
    ),
    "memory": (
        lambda m, h: m.after(torch.cuda.memory_allocated(), h),
        r"it calls memory_allocated\(\), .*take it out of the forward",
        (),
    ),
    "timer": (lambda m, h: m.within(m.timer, h), f"it enters a Timer .*{AROUND}", ()),
    "context variable": (
        lambda m, h: h * DEPTH.get(),
        f"it reads or sets a ContextVar, .*{OUTSIDE}, and pass",
        (),
    ),
    "context variable set": (
        lambda m, h: m.after(DEPTH.set(1), h),
        f"it reads or sets a ContextVar, .*{OUTSIDE}, and pass",
        (),
    ),
    "generator": (
        lambda m, h: h * next(m.numbers),
        f"takes the next value of a generator, .*{OUTSIDE}, and pass",
        (),
    ),
    "attribute of a function": (
        lambda m, h: m.after(counter(h), h),
        "sets an attribute of a function, .*buffer that is updated in place",
        (Net.used_in_tensor,),
    ),
    "collect": (
        lambda m, h: m.after(gc.collect(), h),
        r"it calls gc\.collect\(\), .*take it out of the forward",
        (),
    ),
    "disabled": (
        lambda m, h: aside(h),
        r'it calls aside\(\), which torch\.compiler\.disable .*opaque.*"memopt".*"budget": \.',
        (lambda m, h: aside_as_one(h),),
    ),
    "freezes": (
        lambda m, h: m.after(m.linear.requires_grad_(False), h),
        r"it freezes a module's parameters, .*torch\.no_grad\(\)",
        (Net.frozen,),
    ),
    "cached property": (
        lambda m, h: h * m.table,
        "reads a functools.cached_property .*once before planning",
        (),
    ),
    "retain_grad": (lambda m, h: m.after(h.retain_grad(), h), r"retain_grad\(\) .*h \+ zeros", ()),
    "hook": (
        lambda m, h: m.after(h.register_hook(lambda g: KEPT.append(g)), h),
        r"a hook that it sets on a tensor changes a Python object .*h \+ zeros",
        (),
    ),
    "function": (
        lambda m, h: Twice.apply(h),
        r"an autograd\.Function changes a Python object .*in the forward.*h \+ zeros",
        (Net.appended,),
    ),
    "checkpoint": (
        lambda m, h: checkpoint(kept, h, use_reentrant=False),
        r"a checkpointed block changes a Python object .*without checkpoint\(\)",
        (Net.appended,),
    ),
    "branch": (
        lambda m, h: torch.cond(h.sum() > 0, kept, torch.cos, (h,)),
        r"given to torch\.cond changes a Python object .*after torch\.cond",
        (),
    ),
    "saved": (
        lambda m, h: m.within(saved_tensors_hooks(lambda x: x * 1, lambda x: x * 2), h),
        "saved-tensor hooks .*leave them out",
        (),
    ),
    "on cpu": (lambda m, h: m.within(save_on_cpu(), h), "saved-tensor hooks .*leave them out", ()),
    "numpy": (
        Net.used_more,
        r"at .*test_remedies_of_python\.py:\d+ \(self\.usage\[0\] \+= .*register_buffer",
        (Net.used_in_tensor,),
    ),
}
JARGON = ("HOP", "AOTDispatcher", "skipped", "Attempted", "torch._check", "eval_with_key")
TRACED = ("timer", "context variable", "attribute of a function")
"""What torch traces from 2.14 on."""


def check_planned(name: str) -> None:
    """The planned forward does what the forward does; what it read before is guarded."""
    model, x = Net(ROWS[name][0]), torch.randn(2, 3)
    planned = memopt.plan(model, x, **QUIET).apply(model)
    results = []
    for module in (model, planned):
        KEPT.clear()
        vars(counter).clear()
        results.append((module(x), [*KEPT, *vars(counter).items()]))
    (expected, left), (found, left_planned) = results
    assert torch.equal(found, expected)
    assert left_planned == left
    if name == "context variable":
        token = DEPTH.set(3)
        try:
            with pytest.raises(GuardError, match=r"DEPTH\.get\(\): planned 1, got 3"):
                planned(x)
        finally:
            DEPTH.reset(token)


@pytest.mark.parametrize("name", ROWS)
def test_a_cause_is_named_and_its_remedy_works(name: str) -> None:
    if name in TRACED and torch.__version__ >= (2, 14):
        check_planned(name)
        return
    form, message, remedied = ROWS[name]
    with pytest.raises(CaptureError) as refused:
        capture(Net(form), to_call(torch.randn(2, 3)))
    said = str(refused.value)
    assert re.search(message, said), said
    assert "test_remedies_of_python.py:" in said, said
    assert not any(words in said for words in JARGON), said
    for one in remedied:
        torch.compiler.reset()
        capture(Net(one), to_call(torch.randn(2, 3)))


class Probed(Net):
    """Has the gradient of a hidden tensor as that of an argument, as is advised."""

    def forward(self, x: Tensor, zeros: Tensor) -> Any:
        h = torch.tanh(self.linear(x)) + zeros
        return h, self.linear(h.sin())


def test_an_argument_of_zeros_has_the_gradient_of_a_hidden_tensor() -> None:
    model, x = Probed(Net.after), torch.randn(2, 3)
    zeros = [torch.zeros(2, 3, requires_grad=True) for _ in range(2)]
    h, y = model(x, zeros[0])
    h.retain_grad()
    y.square().sum().backward()
    planned = memopt.plan(model, (x, zeros[1]), **QUIET).apply(model)
    planned(x, zeros[1])[1].square().sum().backward()
    for one in zeros:
        torch.testing.assert_close(one.grad, h.grad, rtol=0, atol=0)


def test_a_cached_property_that_was_read_is_planned() -> None:
    model = Net(lambda m, h: h * m.table)
    assert model.table.sum() == 3
    capture(model, to_call(torch.randn(2, 3)))


def test_a_context_that_the_forward_makes_is_planned() -> None:
    capture(Net(lambda m, h: m.within(torch.no_grad(), h) + h), to_call(torch.randn(2, 3)))


def compiled(form: Form) -> Any:
    torch.compiler.reset()
    return torch.compile(Net(form), backend="memopt", options=dict(QUIET))


def test_compiled_parts_around_what_is_disabled_are_planned() -> None:
    x = torch.randn(2, 3)
    with pytest.warns(UserWarning, match="aside"):
        compiled(lambda m, h: aside(h))(x).sum().backward()


def test_numpy_in_compiled_code_is_named_by_the_users_line() -> None:
    with pytest.raises(CaptureError) as refused:
        compiled(Net.used_more)(torch.randn(2, 3))
    said = str(refused.value)
    assert re.search(r"test_remedies_of_python\.py:\d+ \(self\.usage\[0\] \+= .*numpy arrays", said)
    assert not any(words in said for words in JARGON), said
    compiled(Net.used_in_tensor)(torch.randn(2, 3)).sum().backward()


def test_a_hook_in_compiled_code_is_taken_by_wrap() -> None:
    def hooked(_model: Net, h: Tensor) -> Tensor:
        h.register_hook(lambda gradient: -gradient)
        return h

    x = torch.randn(2, 3)
    with pytest.raises(CaptureError, match=r"test_remedies_of_python.*register_hook.*memopt\.wrap"):
        compiled(hooked)(x)
    torch.compiler.reset()
    model = Net(hooked)
    model(x).sum().backward()
    wanted = model.linear.weight.grad
    model.linear.weight.grad = None
    memopt.wrap(model, **QUIET)(x).sum().backward()
    torch.testing.assert_close(model.linear.weight.grad, wanted, rtol=0, atol=0)


def test_a_number_that_changes_in_compiled_code_is_read_in_each_call() -> None:
    """It was refused."""
    torch.compiler.reset()
    model, x = Net(lambda m, h: h * RATE["rate"]), torch.randn(2, 3)
    step = torch.compile(model, backend="memopt", options=dict(QUIET))
    for RATE["rate"] in (1.0, 0.5, 0.25, 0.125):
        planned, eager = step(x), model(x)
        assert torch.equal(planned, eager)
        planned.sum().backward()


def test_an_attribute_of_a_thread_is_named() -> None:
    def counted(_model: Net, h: Tensor) -> Tensor:
        LOCAL.count += "1"
        return h

    LOCAL.count = ""
    with pytest.raises(CaptureError, match=r"changes Python state of \S*LOCAL\.count "):
        capture(Net(counted), to_call(torch.randn(2, 3)))
    assert not LOCAL.count


def test_a_buffer_that_a_step_binds_anew_is_named() -> None:
    def bound(model: Net, h: Tensor) -> Tensor:
        model.used = model.used + h.detach().mean()
        return h

    model, how = Net(bound), dict(QUIET, whole_step=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(CaptureError, match=r"leaves tensors or counts behind in model\.used,"):
        memopt.plan(
            model,
            (torch.randn(2, 3),),
            loss_fn=lambda y, t: (y - t).square().mean(),
            targets=(torch.randn(2, 3),),
            optimizer=optimizer,
            **how,
        )


def test_a_layer_without_its_size_is_named_before_anything_is_planned() -> None:
    with pytest.raises(CaptureError, match="LazyLinear '0' has no parameters"):
        memopt.plan(nn.Sequential(nn.LazyLinear(4)), (torch.randn(2, 3),), **QUIET)
