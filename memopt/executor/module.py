"""The drop-in module: same parameters, same outputs, same state_dict keys."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from memopt.errors import ExecutionError, GuardError
from memopt.executor.arena import ArenaFamily, Arenas, arena_layout
from memopt.executor.arena_check import CheckedArenas
from memopt.executor.codegen import generate
from memopt.executor.differentiated import AsOriginal, pattern
from memopt.executor.guard import Guard
from memopt.executor.handover import HandoverOrder
from memopt.executor.homes import Homes
from memopt.executor.interpret import interpret
from memopt.executor.random_state import RandomStates
from memopt.executor.recorder import Recorder
from memopt.executor.runtime import Arrived, Installed, Runtime
from memopt.executor.swap import ThreadSwap
from memopt.executor.swap_streams import DeviceStreams, StreamSwap
from memopt.executor.values import Halves
from memopt.models.budget import format_bytes
from memopt.profiler.backend import backend_of
from memopt.profiler.build import Lowering
from memopt.profiler.capture import Captured
from memopt.profiler.dependencies.dependencies import Dependencies
from memopt.profiler.inputs import Call, align
from memopt.profiler.model_outputs import refusing_gradients
from memopt.profiler.torch_private import captured_around
from memopt.profiler.training_call import as_planned
from memopt.programs.instructions import Program

OnMismatch: TypeAlias = Callable[[nn.Module, Call, GuardError], nn.Module]
"""(the user's model, a call that is not the planned one, what differs) → the module to call."""


def install(
    captured: Captured,
    lowering: Lowering,
    program: Program,
    *,
    interpreted: bool = False,
    swap: ThreadSwap | StreamSwap | None = None,
    recorder: Recorder | None = None,
    checked: bool = False,
    family: ArenaFamily | None = None,
    homes: Homes | None = None,
) -> Installed:
    """Make a program runnable in its captured model.

    Args:
        captured: the model's joint graph.
        lowering: its Graph and node map; the program's indices refer to it.
        program: a valid program.
        interpreted: run instruction by instruction instead of by generated code.
        swap: how host copies are made; None: streams on CUDA, else worker threads.
        recorder: records the generated code's steps (`recorder_for`); not interpreted ones.
        checked: the arena's debug mode (`memopt.executor.arena_check`). Interpreted steps have no
            arena: their tensors are where torch's allocator puts them.
        homes: the host copies of moved parameters and state (train steps).
        family: whose arena it runs in; None: its own.
    """
    halves = Halves(captured, lowering, program)
    device = _device(captured)
    mover = _mover(halves, device, recorder) if swap is None else swap
    if homes is not None:
        homes.swap = mover
    random = RandomStates(device)
    layout = None if interpreted else arena_layout(lowering, program, device)
    arenas = None
    if layout is not None:
        arenas = (CheckedArenas if checked else Arenas)(layout, family)
    order = None
    if interpreted:
        forward, backward = interpret(halves, mover, random, homes)
        source = ""
    else:
        forward, backward, source = generate(halves, mover, random, recorder, arenas, homes)
        order = HandoverOrder.of(halves, mover, random, recorder, arenas)
    mutated = set(captured.mutated)
    return Installed(
        forward=random.settling(forward),
        backward=random.settling(backward),
        watched=tuple(
            i
            for i in sorted(halves.backward_primals)
            if i not in mutated
            and isinstance(captured.primals[i].node.meta.get("val"), torch.Tensor)
        ),
        names=tuple(p.name or p.node.name for p in captured.primals),
        source=source,
        watched_outputs=halves.outputs_read_later,
        fork=list if arenas is None else arenas.fork,
        handover=order,
    )


def _mover(
    halves: Halves, device: torch.device, recorder: Recorder | None
) -> ThreadSwap | StreamSwap:
    pool_bytes = halves.host_placement.extent_bytes
    if not backend_of(device).on_host and (pool_bytes or halves.moved):
        return StreamSwap(DeviceStreams(device, recorder), pool_bytes, recorder)
    return ThreadSwap(recorder)


def _device(captured: Captured) -> torch.device:
    for primal in captured.primals:
        value = primal.node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return value.device
    return torch.device("cpu")


@dataclass
class Calls:
    """How many calls of a planned module ran in which way.

    Attributes:
        planned: under the plan.
        original: by the unplanned model: evaluation, and with `otherwise="original"` calls that
            were not planned.
        replanned: under another plan, with `otherwise="replan"`.
    """

    planned: int = 0
    original: int = 0
    replanned: int = 0
    _warned: bool = field(default=False, repr=False, compare=False)
    _differentiated: bool = field(default=False, repr=False, compare=False)

    def fall_back(self, model: nn.Module, reason: str) -> None:
        """Count a call of the unplanned model; warn when it is the first training step.

        Args:
            model: the unplanned model.
            reason: why the plan does not run, for people.
        """
        self.original += 1
        if self._warned or not torch.is_grad_enabled():
            return
        if any(module.training for module in model.modules()):
            self._warned = True
            warnings.warn(
                f"a training step ran without its plan: {reason}. The planned module's .calls "
                "counts how its calls ran; this is said once",
                stacklevel=5,
            )

    def take_back(self) -> None:
        """Count a planned call as one of the unplanned model, which runs in its place for a
        backward that is differentiated itself; the first time warn."""
        self.planned -= 1
        self.original += 1
        if not self._differentiated:
            self._differentiated = True
            warnings.warn(
                "a planned call's backward is differentiated itself (create_graph=True: a gradient "
                "penalty, a product with a Hessian), which a plan cannot do: the original model "
                "runs for it, outside of the budget. The planned module's .calls counts such "
                "calls; this is said once",
                stacklevel=2,
            )


class PlannedModule(nn.Module):
    """A model whose training step runs under a plan.

    It shares the model's parameters, buffers and sub-modules (not copies), so optimizers,
    `state_dict` and `to()` work as on the model itself. Under `torch.no_grad()` or in eval mode
    the original forward runs. Other attributes are the model's, too: setting one sets it there.
    Hooks of inner modules run as they were when the model was planned, in the planned graph; with
    others a step is refused.
    """

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        runtime: Runtime,
        program: Installed,
        on_mismatch: OnMismatch | None = None,
        dependencies: Dependencies | None = None,
        spare_bytes: int | None = None,
    ) -> None:
        super().__init__()
        for name in _shared_names(model):
            self.__dict__[name] = model.__dict__[name]
        self.__dict__["_memopt"] = (model, captured, runtime, program)
        self.__dict__["_memopt_on_mismatch"] = on_mismatch
        self.__dict__["_memopt_calls"] = Calls()
        self.__dict__["_memopt_twice"] = set()
        self.__dict__["_memopt_spare"] = spare_bytes
        self.__dict__["_memopt_arrived"] = None
        self.__dict__["_memopt_guard"] = Guard.of(model, captured.call, captured, dependencies)

    @property
    def training(self) -> bool:
        """The model's mode. Loops set it module by module, and must set the model's own."""
        return bool(self.original.training) if "_memopt" in self.__dict__ else True

    @training.setter
    def training(self, mode: bool) -> None:
        if "_memopt" in self.__dict__:
            self.original.training = mode

    @property
    def calls(self) -> Calls:
        """How many calls ran under the plan, as the original, or under another plan."""
        calls: Calls = self.__dict__["_memopt_calls"]
        return calls

    def count_in(self, calls: Calls) -> None:
        """Count the calls elsewhere from now on."""
        self.__dict__["_memopt_calls"] = calls

    def when_arrived(self, arrived: Arrived) -> None:
        """Tell of the gradients with which each backward begins from now on."""
        self.__dict__["_memopt_arrived"] = arrived

    @property
    def original(self) -> nn.Module:
        """The unplanned model."""
        model: nn.Module = self.__dict__["_memopt"][0]
        return model

    @property
    def code(self) -> str:
        """The generated source that runs; "" when interpreted."""
        return str(self.__dict__["_memopt"][3].source)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_memopt" not in self.__dict__:
                raise
            return getattr(self.original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        known = getattr(PlannedModule, name, None)
        if isinstance(known, property):
            # Not by nn.Module, which would register a module under the name.
            object.__setattr__(self, name, value)
        elif self._keeps(name):
            super().__setattr__(name, value)
        else:
            setattr(self.original, name, value)

    def __delattr__(self, name: str) -> None:
        if self._keeps(name):
            super().__delattr__(name)
        else:
            delattr(self.original, name)

    def _keeps(self, name: str) -> bool:
        """Whether an attribute is the planned module's, not the model's."""
        return (
            "_memopt" not in self.__dict__ or name in self.__dict__ or hasattr(PlannedModule, name)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedModule:
        """The plan around a deep copy of the model.

        Raises:
            ExecutionError: the step trains or updates a tensor that the model does not register.
        """
        model, captured, runtime, program = self.__dict__["_memopt"]
        twin = copy.deepcopy(model, memo)
        for position, primal in enumerate(captured.primals):
            constant = primal.constant
            if constant is None or primal.value(twin, ()) is not constant:
                continue
            if constant.requires_grad or position in captured.mutated:
                raise ExecutionError(
                    "this planned module cannot be copied: its step trains or updates a tensor "
                    "that the model does not register as parameter or buffer; copy "
                    "planned.original and plan the copy"
                )
        on_mismatch = self.__dict__["_memopt_on_mismatch"]
        dependencies = captured.dependencies.of_copy(model, twin)
        spare_bytes = self.__dict__["_memopt_spare"]
        copied = PlannedModule(
            twin, captured, runtime, program, on_mismatch, dependencies, spare_bytes
        )
        memo[id(self)] = copied
        for name in self.__dict__.keys() - {*_OWN, *_shared_names(model)}:
            copied.__dict__[name] = copy.deepcopy(self.__dict__[name], memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled: compiled code and a running model's state cannot be."""
        raise ExecutionError(
            "a planned module cannot be pickled or shallow-copied; save planned.state_dict() and "
            "the plan (plan.save(path)), or pickle planned.original"
        )

    def accepts(self, call: Call) -> bool:
        """Whether a call, as it would be made now, is the planned one."""
        model, captured = self.__dict__["_memopt"][:2]
        guard: Guard = self.__dict__["_memopt_guard"]
        try:
            kwargs = as_planned(captured.call, call.kwargs)
            guard.check(model, align(model, captured.call, call.args, kwargs))
        except GuardError:
            return False
        return True

    def train(self, mode: bool = True) -> PlannedModule:
        """Set the mode of the planned module and of the original one."""
        self.original.train(mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step's forward under the plan; the backward follows by autograd.

        While a module around it is captured, it is what it was made of: its step is planned as a
        part of that module's.
        """
        if captured_around():
            return self.original(*args, **kwargs)
        model, captured, runtime, program = self.__dict__["_memopt"]
        guard: Guard = self.__dict__["_memopt_guard"]
        if guard.evaluating(model):
            self.calls.fall_back(model, "the model itself is in eval mode, parts of it are not")
            return model(*args, **kwargs)
        call = align(model, captured.call, args, as_planned(captured.call, kwargs))
        try:
            guard.check(model, call)
        except GuardError as error:
            on_mismatch: OnMismatch | None = self.__dict__["_memopt_on_mismatch"]
            if on_mismatch is None:
                raise
            instead = on_mismatch(model, call, error)
            if instead is model:
                self.calls.fall_back(model, str(error))
            else:
                self.calls.replanned += 1
            return instead(*args, **kwargs)
        wants_gradients = pattern(call)
        if wants_gradients in self.__dict__["_memopt_twice"]:
            self.calls.original += 1
            return model(*args, **kwargs)
        self.calls.planned += 1
        if self.__dict__["_memopt_spare"] is not None:
            self._warn_of_gradients(self.__dict__["_memopt_spare"])
        held = [p.value(model, ()) for p in captured.primals if p.held]

        def used() -> None:
            # Calls with arguments such as this one's are made for that, and run so from now on.
            if any(wants_gradients):
                self.__dict__["_memopt_twice"].add(wants_gradients)
            self.calls.take_back()

        random = runtime.random
        again = AsOriginal(captured, model, call, guard, random, used)
        return refusing_gradients(
            runtime.run(program, held, call, again, self.__dict__["_memopt_arrived"]),
            captured.outputs.gradients.refused,
        )

    def _warn_of_gradients(self, spare_bytes: int) -> None:
        """Say, once, that gradients are there for which the budget has no room."""
        held = (p.grad for p in self.original.parameters())
        held_bytes = sum(g.untyped_storage().nbytes() for g in held if g is not None)
        if held_bytes <= spare_bytes:
            return
        self.__dict__["_memopt_spare"] = None
        warnings.warn(
            f"gradients of {format_bytes(held_bytes)} were there when a planned step began, which "
            "the plan does not charge: it may exceed its budget by "
            f"{format_bytes(held_bytes - spare_bytes)}. Plan with accumulate=True, or set "
            "gradients to None before each step",
            stacklevel=3,
        )


_OWN = (
    "_memopt",
    "_memopt_guard",
    "_memopt_on_mismatch",
    "_memopt_calls",
    "_memopt_spare",
    "_memopt_arrived",
    "_memopt_twice",
)


def _shared_names(model: nn.Module) -> list[str]:
    """Attributes that a planned module shares with its model."""
    names = ["_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"]
    return names + [name for name in model.__dict__ if "state_dict" in name and "hooks" in name]
