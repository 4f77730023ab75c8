"""The one guard at the door of a planned module: is this call the one that was planned?"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from memopt.errors import CaptureError, GuardError
from memopt.profiler.backend import autocast_state
from memopt.profiler.capture import Captured
from memopt.profiler.dependencies.dependencies import Dependencies
from memopt.profiler.dependencies.reader import Dependency, described, described_text, same
from memopt.profiler.inputs import Call, repeated
from memopt.profiler.objects import Opened
from memopt.profiler.trace import traced_again

_LOG = logging.getLogger(__name__)

REMEDY = "plan again for this call (memopt.plan), or call the original module"
_PLAIN = (bool, int, float, str, tuple, type(None))


def _difference(planned: tuple[Any, ...], found: tuple[Any, ...]) -> str:
    return f"planned {described_text(planned)}, got {described_text(found)}"


def _brief(value: Any) -> str:
    match value:
        case torch.Tensor():
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        case dict():
            return "{" + ", ".join(f"{k!r}: {_brief(v)}" for k, v in value.items()) + "}"
        case list() | tuple():
            inner = ", ".join(map(_brief, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner})"
        case Opened():
            pairs = zip(value.names, value.values, strict=True)
            return f"{value.kind.__name__}({', '.join(f'{n}={_brief(v)}' for n, v in pairs)})"
        case _:
            return repr(value)


def _call_text(call: Call) -> str:
    args, kwargs = call.opened
    parts = [_brief(v) for v in args] + [f"{k}={_brief(v)}" for k, v in kwargs.items()]
    return f"model({', '.join(parts)})"


def _constants(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Settings that torch's own modules declare (`__constants__`): a dropout's p, a norm's eps."""
    names: Iterable[str] = getattr(type(module), "__constants__", ())
    pairs = ((name, getattr(module, name, None)) for name in names)
    return tuple((name, value) for name, value in pairs if isinstance(value, _PLAIN))


def _registered(modules: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, under all their names; cheaper than `named_parameters`."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, module in modules.items()
        for registry in (module._parameters, module._buffers)
        for name, tensor in registry.items()
        if tensor is not None
    }


def _structure(modules: dict[str, nn.Module]) -> list[Dependency]:
    """The modules of a model, their types, modes and settings, and their tensors: what the guard
    finds out one by one where it has to say what differs, as looks."""
    looks: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for path, module in modules.items():
        source = "model" + "".join(f"._modules[{p!r}]" for p in path.split(".") if path)
        looks[f"type({source})"] = type(module)
        looks[f"{source}.training"] = module.training
        looks |= {f"{source}.{setting}": value for setting, value in _constants(module)}
        for registry in ("_parameters", "_buffers"):
            tensors |= {
                f"{source}.{registry}[{name!r}]": tensor
                for name, tensor in getattr(module, registry).items()
                if tensor is not None
            }
    looks |= {f"described({source})": described(tensor) for source, tensor in tensors.items()}
    looks |= {f"{other} is {source}": True for other, source in _ties(tensors).items()}
    if tensors:
        ids = ", ".join(f"id({source})" for source in tensors)
        looks[f"len({{{ids}}})"] = len({id(tensor) for tensor in tensors.values()})
    return [Dependency(look, look, look, planned) for look, planned in looks.items()]


def _ties(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Parameters and buffers that are the same tensor as an earlier one: name → earlier name."""
    first: dict[int, str] = {}
    earlier = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
    return {name: other for name, other in earlier.items() if other != name}


def _identities(leaves: list[Any], parameters: dict[int, str]) -> tuple[Any, ...]:
    """For each argument that is a parameter, its name; that is an earlier argument, its index."""
    earlier = repeated(leaves)
    return tuple(parameters.get(id(leaf), earlier.get(i)) for i, leaf in enumerate(leaves))


class _State:
    """A state of everything that a trace read, of which its graph is known to be right.

    Args:
        dependencies: what was read, and how it is.
        structure: the same of modules, parameters and buffers.
        recomputes: see `Dependencies.late`.
    """

    def __init__(
        self, dependencies: Dependencies, structure: Sequence[Dependency], recomputes: bool
    ) -> None:
        self.dependencies, self._recomputes = dependencies, recomputes
        self.everything = dependencies.with_others(structure)

    @cached_property
    def late(self) -> Dependencies:
        """What eager reads in the backward."""
        return self.dependencies.late(self._recomputes)


class DependencyCheck:
    """Looks at everything that one captured model's trace read.

    Args:
        captured: the captured model.
        dependencies: what its trace read.
        structure: what else must be as planned: modules, parameters and buffers.
    """

    def __init__(
        self, captured: Captured, dependencies: Dependencies, structure: Sequence[Dependency]
    ) -> None:
        self._captured, self._structure = captured, structure
        # That of the last call first.
        self._states: list[_State] = []
        self._add(dependencies)
        self._refused: tuple[Dependency, Any] | None = None
        self._traces = 0

    def _add(self, dependencies: Dependencies) -> None:
        state = _State(dependencies, self._structure, self._captured.outputs.recomputes)
        self._states = [state, *self._states][:_MOST_STATES]

    def unchanged(self, model: nn.Module) -> bool:
        """Whether nothing has changed, the structure included."""
        for state in self._states:
            if state.everything.unchanged(model):
                if state is not self._states[0]:
                    self._states = [state, *(one for one in self._states if one is not state)]
                return True
        return False

    def difference(self, model: nn.Module) -> str | None:
        """What changed and both values; None: all is as planned.

        Dynamo asks for more than a graph needs where a global is concerned, or what the forward
        itself changes: a registry that has grown fails its guards. Where only such things changed,
        the model is traced again, and what gives the same graph is right.
        """
        found = [state.dependencies.changed(model) for state in self._states]
        if None in found or found[0] is None:
            return None
        dependency, value = found[0]
        difference = dependency.difference(value)
        refused = self._refused
        known = refused and refused[0] is dependency and same(value, refused[1])
        if dependency.shared and not known:
            _LOG.info("tracing again: %s", difference)
            dependencies = self._traced_again(model)
            if dependencies is not None:
                self._add(dependencies)
                self._count(difference)
                return None
            # A trace takes seconds: not for every call.
            self._refused = (dependency, value)
        return difference

    def _count(self, difference: str) -> None:
        """Warn, once, where every call finds another state."""
        self._traces += 1
        if self._traces == _MOST_STATES:
            warnings.warn(
                f"the model was traced {self._traces} times again, which takes seconds each: "
                "something that its forward reads or adds to differs from call to call (the last: "
                f"{difference}). Clear such lists and dicts between steps",
                stacklevel=4,
            )

    def late_difference(self, model: nn.Module, values: Sequence[Any]) -> str | None:
        """What has changed since the forward of that which eager reads in the backward; None:
        nothing.

        Args:
            model: the user's model.
            values: of the captured inputs in the forward.
        """
        late = self._states[0].late
        changed = None if late.unchanged(model) else late.changed(model)
        if changed is not None:
            dependency, found = changed
            return dependency.difference(found)
        if late.late_names == frozenset():
            return None
        for primal, value in zip(self._captured.primals, values, strict=True):
            source = late.source_of(primal.constant) if primal.constant is not None else primal.name
            if (
                primal.held
                and not primal.part
                and late.may_read(source)
                and primal.value(model, ()) is not value
            ):
                return f"{source} is another tensor"
        return None

    def _traced_again(self, model: nn.Module) -> Dependencies | None:
        one = self._captured
        try:
            return traced_again(model, one.call, one.device, one.trace)
        except (CaptureError, RuntimeError):
            return None


_MOST_STATES = 8


@dataclass(frozen=True)
class Guard:
    """What a plan was made for.

    Attributes:
        spec: structure of the arguments.
        text: the call, for messages.
        leaves: description of every flat argument.
        same: which flat arguments are a parameter or an earlier argument.
        separate: whether arguments that were apart must stay so (the step updates one in place).
        modules: (name, type, training flag, declared settings) of every sub-module.
        parameters: (name, description) of every parameter and buffer.
        ties: (name, earlier name) of each parameter and buffer that is one with an earlier one.
        apart: names of those that must not become one with another, as the step updates them.
        autocast: its dtype on cpu and cuda.
        keeps_casts: whether autocast keeps the casts of parameters.
        dependencies: everything else that the trace relied on; None: not known.
    """

    spec: Any
    text: str
    leaves: tuple[tuple[Any, ...], ...]
    same: tuple[Any, ...]
    separate: bool
    modules: tuple[tuple[str, type, bool, tuple[tuple[str, Any], ...]], ...]
    parameters: tuple[tuple[str, tuple[Any, ...]], ...]
    ties: tuple[tuple[str, str], ...]
    apart: frozenset[str]
    autocast: tuple[str | None, ...]
    keeps_casts: bool
    dependencies: DependencyCheck | None = None

    @staticmethod
    def of(
        model: nn.Module,
        call: Call,
        captured: Captured | None = None,
        dependencies: Dependencies | None = None,
        updated: Iterable[str] = (),
    ) -> Guard:
        """The guard of a model and its example call: as they are now, but for what the trace read.

        Args:
            model: the user's model.
            call: the captured call.
            captured: the captured model, where a step of it is guarded.
            dependencies: what the trace read; None: as it was captured.
            updated: names of parameters that the step updates.
        """
        modules = dict(model.named_modules())
        tensors = _registered(modules)
        named = list(tensors.items())
        mutated = [captured.primals[i] for i in captured.mutated] if captured is not None else []
        checked = None
        if captured is not None:
            checked = DependencyCheck(
                captured, dependencies or captured.dependencies, _structure(modules)
            )
        return Guard(
            spec=call.spec,
            text=_call_text(call),
            leaves=tuple(described(leaf) for leaf in call.leaves),
            same=_identities(call.leaves, {id(tensor): name for name, tensor in named}),
            separate=any(primal.kind == "input" for primal in mutated),
            modules=tuple(
                (name, type(m), m.training, _constants(m)) for name, m in modules.items()
            ),
            parameters=tuple((name, described(tensor)) for name, tensor in named),
            ties=tuple(_ties(tensors).items()),
            apart=frozenset((*updated, *(primal.name for primal in mutated))),
            autocast=autocast_state(),
            keeps_casts=torch.is_autocast_cache_enabled(),
            dependencies=checked,
        )

    def evaluating(self, model: nn.Module) -> bool:
        """Whether this call is evaluation: no gradients wanted, or the model put in eval mode."""
        if not torch.is_grad_enabled():
            return True
        planned_in_train = self.modules[0][2]
        return planned_in_train and not model.training

    def check(self, model: nn.Module, call: Call) -> None:
        """Raise GuardError, naming both sides, unless the call is the planned one."""
        difference = next(self._differences(model, call), None)
        if difference is not None:
            raise GuardError(f"{difference}; {REMEDY}")

    def late_difference(self, model: nn.Module, values: Sequence[Any]) -> str | None:
        """See `DependencyCheck.late_difference`."""
        check = self.dependencies
        return None if check is None else check.late_difference(model, values)

    def _differences(self, model: nn.Module, call: Call) -> Iterator[str]:
        """Where the call is not the planned one, the first first; not to be asked for a second."""
        if call.spec != self.spec:
            other = _call_text(call)
            yield f"the plan was made for other arguments: planned {self.text}, got {other}"
        for i, (leaf, planned) in enumerate(zip(call.leaves, self.leaves, strict=True)):
            found = described(leaf)
            if found != planned:
                yield f"argument {i}: {_difference(planned, found)}"
        as_planned = self.dependencies is not None and self.dependencies.unchanged(model)
        if not as_planned:
            modules = dict(model.named_modules())
            yield from self._other_modules(modules)
            tensors = _registered(modules)
            yield from self._other_parameters(tensors)
            yield from self._other_ties(tensors)
        yield from self._other_identities(model, call.leaves)
        if autocast_state() != self.autocast:
            yield f"autocast: planned {self.autocast}, got {autocast_state()} (on cpu, cuda)"
        if any(self.autocast) and torch.is_autocast_cache_enabled() != self.keeps_casts:
            was, now = self.keeps_casts, not self.keeps_casts
            yield f"autocast: planned with cache_enabled={was}, got cache_enabled={now}"
        if self.dependencies is not None and not as_planned:
            difference = self.dependencies.difference(model)
            if difference is not None:
                yield difference

    def _other_modules(self, modules: dict[str, nn.Module]) -> Iterator[str]:
        for name, kind, training, constants in self.modules:
            where = f"module {name!r}" if name else "the model"
            module = modules.get(name)
            if module is None or type(module) is not kind:
                found = "nothing" if module is None else type(module).__name__
                yield f"{where}: planned {kind.__name__}, got {found}"
            elif module.training != training:
                modes = ("train", "eval") if training else ("eval", "train")
                yield f"{where}: planned in {modes[0]} mode, got {modes[1]} mode"
            for setting, value in constants:
                now = getattr(module, setting, None)
                if now != value:
                    yield f"{where}: planned {setting}={value}, got {now}"

    def _other_parameters(self, tensors: dict[str, torch.Tensor]) -> Iterator[str]:
        for name, planned in self.parameters:
            if name not in tensors:
                yield f"parameter or buffer {name!r} is gone"
            found = described(tensors[name])
            if found != planned:
                yield f"{name}: {_difference(planned, found)}"

    def _other_ties(self, tensors: dict[str, torch.Tensor]) -> Iterator[str]:
        found, planned = _ties(tensors), dict(self.ties)
        for name, other in planned.items():
            if found.get(name) != other:
                yield f"{name}: planned as one tensor with {other}, got a tensor of its own"
        for name, other in found.items():
            if name not in planned and (name in self.apart or other in self.apart):
                yield f"{name}: planned as a tensor of its own, got one tensor with {other}"

    def _other_identities(self, model: nn.Module, leaves: list[Any]) -> Iterator[str]:
        if not self.separate and not any(s is not None for s in self.same):
            return
        tensors = _registered(dict(model.named_modules()))
        found = _identities(leaves, {id(tensor): name for name, tensor in tensors.items()})
        for position, (planned, now) in enumerate(zip(self.same, found, strict=True)):
            if planned != now and (planned is not None or self.separate):
                texts = _identity_text(planned), _identity_text(now)
                yield f"argument {position}: planned as {texts[0]}, got {texts[1]}"


def _identity_text(identity: Any) -> str:
    if identity is None:
        return "a tensor of its own"
    if isinstance(identity, str):
        return f"the model's {identity}"
    return f"the same tensor as argument {identity}"
