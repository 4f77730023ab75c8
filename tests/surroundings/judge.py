"""Run a situation in eager and under memopt, and say whether both are alike."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import memopt
from memopt.integrations.torch_compile import compiled_steps
from memopt.user_code import left_out
from tests.surroundings.seen import Seen, difference, everything, seen
from tests.surroundings.situation import Setting, Situation

STEPS = 3
QUIET: dict[str, Any] = {"budget": "min", "progress": False, "cache": False}
Kind = Literal["exact", "unsaid", "refused", "unplanned", "torch's", "WRONG"]

# What is no explanation for a person who trains a model.
_JARGON = re.compile(
    r"HOP:|HigherOrder|Dynamo attempts|source=|AOTDispatcher|<eval_with_key>|marked as skipped"
    r"|Attempted to (call|inline|access)"
)
_OF_VALUES = re.compile("[Dd]ata-dependent")


@dataclass(frozen=True)
class Verdict:
    """exact; exact but for words that are left out, which is said; refused, naming what is touched;
    as eager, unplanned, and said; not as eager, but as under torch.compile without memopt; or
    WRONG."""

    kind: Kind
    reason: str = ""


@dataclass
class Heard:
    """What a run says."""

    records: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    printed: io.StringIO = field(default_factory=io.StringIO)


@dataclass
class Run:
    """What was seen in a run.

    Attributes:
        views: of all that the user owns, one for each moment.
        trace: what planning has changed.
        error: what ended the run, and `left` what the step that it ended has changed.
        planned_calls: how many ran under a plan.
        said: memopt's warnings and log records.
    """

    views: dict[str, Seen] = field(default_factory=dict)
    trace: str = ""
    error: Exception | None = None
    left: str = ""
    planned_calls: int = STEPS
    said: list[str] = field(default_factory=list)


class _Records(logging.Handler):
    def __init__(self, heard: Heard, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.heard, self.said = heard, said

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("memopt"):
            self.said.append(record.getMessage())
        elif record.name.startswith("surroundings"):
            self.heard.records.append(record.getMessage())


@contextlib.contextmanager
def listening(heard: Heard, said: list[str]) -> Iterator[None]:
    handler, root = _Records(heard, said), logging.getLogger()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        text = str(message)
        if text.startswith("surroundings:"):
            heard.warned.append(text)
        elif re.search(r"\bplan(s|ned)?\b|memopt", text):
            said.append(text)

    root.addHandler(handler)
    with warnings.catch_warnings(), contextlib.redirect_stdout(heard.printed):
        warnings.simplefilter("always")
        warnings.showwarning = show
        try:
            yield
        finally:
            root.removeHandler(handler)


def _default_world() -> None:
    """What a run before may have left."""
    left_out._TOLD.clear()
    torch.compiler.reset()
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    draw = functools.partial(torch.randn, generator=generator)
    return draw(4, 6), draw(4, 3)


class _Loop:
    """One training loop of a setting, written for one way."""

    def __init__(self, setting: Setting, way: str, heard: Heard) -> None:
        self.setting, self.way, self.heard = setting, way, heard
        trained = [p for p in setting.model.parameters() if p.requires_grad]
        self.optimizer = setting.optimizer(trained)
        self.run = Run()
        self.module: Any = None
        self.before: Seen = None

    def look(self) -> Seen:
        heard = self.heard
        return everything(
            self.setting, self.optimizer, [heard.records, heard.warned, heard.printed]
        )

    def planned(self) -> Any:
        """What is called in a step."""
        model, loss = self.setting.model, self.setting.loss
        x, target = batch(0)
        inputs = (x, *self.setting.inputs(0))
        if self.way == "plan":
            return memopt.plan(model, inputs, **QUIET).apply(model)
        if self.way == "wrap":
            return memopt.wrap(model, **QUIET)
        if self.way == "train_step":
            plan = memopt.plan(
                model,
                inputs,
                loss_fn=loss,
                targets=(target,),
                optimizer=self.optimizer,
                whole_step=True,
                **QUIET,
            )
            return plan.train_step(model, loss, self.optimizer)
        if self.way == "aot_eager":
            return torch.compile(model, backend="aot_eager")
        if self.way == "backend":
            return torch.compile(model, backend="memopt", options=dict(QUIET))
        return model

    def step(self, module: Any, step: int) -> None:
        setting, views = self.setting, self.run.views
        x, target = batch(step)
        args = (x, *setting.inputs(step))
        if self.way == "train_step":
            with setting.around():
                loss = module(*args, targets=(target,))
        else:
            with setting.around():
                output = setting.call(module, args)
                views[f"step {step}, output"] = seen(output)
                loss = setting.loss(output, target)
            views[f"step {step}, forward"] = self.look()
            setting.between(step)
            self.before = self.look()
            loss.backward()
            views[f"step {step}, backward"] = self.look()
            views[f"step {step}, input's gradient"] = seen(x.grad)
            self.optimizer.step()
            self.optimizer.zero_grad()
        views[f"step {step}, loss"] = seen(loss.detach())
        views[f"step {step}, done"] = self.look()

    def whole(self) -> Run:
        run, setting = self.run, self.setting
        self.before = self.look()
        try:
            module = self.module = self.planned()
            run.views["planning"] = self.look()
            run.trace = difference(self.before, run.views["planning"])
            setting.ready(module)
            for step in range(STEPS):
                setting.before(step)
                self.before = self.look()
                self.step(module, step)
                setting.after(step)
        except Exception as error:  # noqa: BLE001 - every kind of error is a result here
            run.error = error
            run.left = difference(self.before, self.look())
        if self.way in ("plan", "wrap") and run.error is None:
            # A model may have a `calls` of its own.
            calls = (self.module.memopt if self.way == "wrap" else self.module).calls
            run.planned_calls = calls.planned + calls.replanned
        return run


def run(make: Callable[[], Setting], way: str) -> Run:
    """Train a setting for some steps; way "eager": without memopt."""
    _default_world()
    heard, said = Heard(), list[str]()
    before = len(compiled_steps())
    with listening(heard, said):
        made = make()
        found = _Loop(made, way, heard).whole()
    if way == "backend":
        found.planned_calls *= any(step.graphs for step in compiled_steps()[before:])
    found.said = said
    _default_world()
    return found


def own(error: Exception) -> bool:
    """Whether memopt raised it on purpose."""
    if isinstance(error, memopt.MemoptError):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    at = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return isinstance(error, (ValueError, TypeError)) and at.startswith("memopt.")


def allowed(situation: Situation, way: str) -> tuple[Kind, ...]:
    """The verdicts that a cell may have."""
    if way in situation.exact:
        return ("exact",)
    kinds: tuple[Kind, ...] = ("exact", "refused", "unplanned")
    if situation.says:
        kinds = (*kinds, "unsaid")
    return (*kinds, "torch's") if way == "backend" and situation.torchs else kinds


def judge(situation: Situation, way: str) -> Verdict:
    """The verdict on a situation under one of the ways."""
    eager = _eager(situation)
    assert eager.error is None, f"{situation.name} does not run in eager: {eager.error!r}"
    found = run(situation.make, way)
    if found.error is not None and not found.trace:
        differs = _differs(eager, found)
        return Verdict("WRONG", differs) if differs else _refusal(situation, way, found)
    verdict = verdict_of(eager, found)
    if verdict.kind == "WRONG" and way == "backend" and situation.torchs:
        alike = verdict_of(run(situation.make, "aot_eager"), found)
        return Verdict("torch's", situation.torchs) if alike.kind == "exact" else alike
    return verdict


@functools.lru_cache(maxsize=4)
def _eager(situation: Situation) -> Run:
    return run(situation.make, "eager")


def _refusal(situation: Situation, way: str, found: Run) -> Verdict:
    error = found.error
    assert error is not None
    text = " ".join(str(error).split())
    if not own(error):
        return Verdict("WRONG", f"raw {type(error).__name__}: {text[:200]}")
    if not re.search(rf"(?<![A-Za-z])(?:{situation.names})", str(error)):
        return Verdict("WRONG", f"a refusal that does not name {situation.names!r}: {text[:900]}")
    if found.left and not (way == "backend" and situation.torchs):
        return Verdict("WRONG", f"refused, and left changed {found.left}")
    of_values = "item" in situation.names
    if _JARGON.search(text) or (_OF_VALUES.search(text) and not of_values):
        return Verdict("WRONG", f"refused in words that do not explain it: {text[:900]}")
    return Verdict("refused", text[:900])


def _leaves_out(found: Run) -> bool:
    """Whether it was said that planned steps leave out what the forward says."""
    return any("planned steps leave out" in text for text in found.said)


def _differs(eager: Run, found: Run) -> str:
    """Where what was seen first differs from eager's; "" nowhere."""
    for moment, view in found.views.items():
        expected = eager.views.get(moment, view)
        if _leaves_out(found) and isinstance(view, dict) and "heard" in view:
            # Nothing was heard, neither of planning nor of steps.
            expected = {**expected, "heard": [[], [], ""]}
        differs = difference(expected, view)
        if differs:
            said = f" (said: {found.said[0][:120]})" if found.said else ""
            return f"{moment}{differs}{said}"
    return ""


def verdict_of(eager: Run, found: Run) -> Verdict:
    """What to say of a run beside eager's."""
    if found.trace:
        return Verdict("WRONG", f"planning left a trace: {found.trace}")
    differs = _differs(eager, found)
    if differs:
        return Verdict("WRONG", differs)
    if not found.planned_calls and not found.said:
        return Verdict("WRONG", "ran unplanned without a word")
    said = "; ".join([f"{found.planned_calls} calls planned", *found.said])[:200]
    if found.planned_calls < STEPS:
        return Verdict("unplanned", said)
    return Verdict("unsaid" if _leaves_out(found) else "exact", said)
