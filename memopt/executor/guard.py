"""The guard of a planned module: checks that a call is the one that was planned."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memopt.capture.as_eager.masks import KeptMasks
from memopt.errors import GuardError
from memopt.executor.dependency_check import DependencyCheck
from memopt.step.backend import autocast_state
from memopt.step.captured import Captured
from memopt.step.dependencies import Dependencies
from memopt.step.described import described, described_text, same
from memopt.step.input_values import InputValue, InputValueError, other_values
from memopt.step.inputs import Call, repeated
from memopt.step.objects import Opened
from memopt.step.reader import GONE, Dependency
from memopt.torch_private.modules import TENSOR_REGISTRIES, buffers_of, parameters_of

_LOG = logging.getLogger(__name__)

REMEDY = "plan again for this call (memopt.plan), or call the original module"
_OF_VALUES = (
    f"{REMEDY}. A plan of a file is applied with inputs that have the values (plan.apply(model, "
    "inputs=...)). Where they differ often, pad to fewer such values, or write that part with "
    "tensor operators (torch.where, a mask)"
)
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
    """Return the settings that torch's modules declare (`__constants__`): a dropout's p, say."""
    names: Iterable[str] = getattr(type(module), "__constants__", ())
    pairs = ((name, getattr(module, name, None)) for name in names)
    return tuple((name, value) for name, value in pairs if isinstance(value, _PLAIN))


def _registered(modules: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Return parameters and buffers under all their names; cheaper than `named_parameters`."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, module in modules.items()
        for registry in (parameters_of(module), buffers_of(module))
        for name, tensor in registry.items()
        if tensor is not None
    }


def _structure(modules: dict[str, nn.Module]) -> list[Dependency]:
    """Return the modules of a model, their types, modes and settings, and their tensors as
    dependencies: one quick check before the guard compares them one by one to name a difference."""
    looks: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for path, module in modules.items():
        source = "model" + "".join(f"._modules[{p!r}]" for p in path.split(".") if path)
        looks[f"type({source})"] = type(module)
        looks[f"{source}.training"] = module.training
        looks |= {f"{source}.{setting}": value for setting, value in _constants(module)}
        for registry in TENSOR_REGISTRIES:
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
    """Map each parameter or buffer that is an earlier one's tensor to the earlier name."""
    first: dict[int, str] = {}
    earlier = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
    return {name: other for name, other in earlier.items() if other != name}


def _identities(leaves: list[Any], parameters: dict[int, str]) -> tuple[Any, ...]:
    """Return a parameter's name for each argument that is one, an index for an earlier argument."""
    earlier = repeated(leaves)
    return tuple(parameters.get(id(leaf), earlier.get(i)) for i, leaf in enumerate(leaves))


@dataclass(frozen=True)
class Guard:
    """The conditions under which a plan is valid.

    Attributes:
        spec: structure of the arguments.
        text: the call, for messages.
        leaves: description of every flat argument.
        same: which flat arguments are a parameter or an earlier argument.
        separate: whether distinct arguments must stay distinct (the step updates one in place).
        modules: (name, type, training flag, declared settings) of every sub-module.
        parameters: (name, description) of every parameter and buffer.
        ties: (name, earlier name) of each parameter and buffer that is an earlier one's tensor.
        apart: names of tensors that must not be tied later, since the step updates them.
        autocast: its dtype on the CPU and the accelerator.
        keeps_casts: whether autocast caches the casts of parameters.
        dependencies: everything else that the trace relied on; None: not known.
        attributes: those of the arguments that it read, see `Dependencies.arguments`.
        values: what it read of the arguments' values, see `Dependencies.values`.
        masks: warns of masks that mask nothing.
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
    attributes: tuple[tuple[int, str, Any], ...] = ()
    values: tuple[InputValue, ...] = ()
    masks: KeptMasks | None = None

    @staticmethod
    def of(
        model: nn.Module,
        call: Call,
        captured: Captured | None = None,
        dependencies: Dependencies | None = None,
        updated: Iterable[str] = (),
    ) -> Guard:
        """Make the guard of a model and its example call in their present state.

        Args:
            model: the user's model.
            call: the captured call.
            captured: the captured model, if a step of it is guarded.
            dependencies: the values that the trace read; None: those of `captured`.
            updated: names of parameters that the step updates.
        """
        modules = dict(model.named_modules())
        tensors = _registered(modules)
        named = list(tensors.items())
        mutated = [captured.primals[i] for i in captured.mutated] if captured is not None else []
        relied = dependencies or (Dependencies() if captured is None else captured.dependencies)
        checked = None
        if captured is not None:
            checked = DependencyCheck(captured, relied, _structure(modules))
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
            attributes=relied.arguments,
            values=relied.values,
            masks=KeptMasks(model, call),
        )

    def of_sizes(self, call: Call) -> Guard:
        """Return the guard of another call, which differs in its sizes alone."""
        leaves = tuple(described(leaf) for leaf in call.leaves)
        return replace(self, text=_call_text(call), leaves=leaves)

    def evaluating(self, model: nn.Module) -> bool:
        """Return whether a call is evaluation: gradients are off, or the model is in eval mode."""
        if not torch.is_grad_enabled():
            return True
        planned_in_train = self.modules[0][2]
        return planned_in_train and not model.training

    def check(self, model: nn.Module, call: Call) -> None:
        """Raise GuardError, naming both sides, unless the call is the planned one."""
        difference = next(self._differences(model, call), None)
        if difference is not None:
            raise GuardError(f"{difference}; {REMEDY}")
        other = next(other_values(self.values, call.leaves), None)
        if other is not None:
            raise InputValueError(f"{other}; {_OF_VALUES}")
        if self.masks is not None:
            self.masks.look(call)

    def late_difference(self, model: nn.Module, values: Sequence[Any]) -> str | None:
        """Check as `DependencyCheck.late_difference` does."""
        check = self.dependencies
        return None if check is None else check.late_difference(model, values)

    def _differences(self, model: nn.Module, call: Call) -> Iterator[str]:
        """Yield differences from the planned call. Only the first is meaningful: take no second."""
        if call.spec != self.spec:
            other = _call_text(call)
            yield f"the plan was made for other arguments: planned {self.text}, got {other}"
        for i, (leaf, planned) in enumerate(zip(call.leaves, self.leaves, strict=True)):
            found = described(leaf)
            if found != planned:
                yield f"argument {i}: {_difference(planned, found)}"
        for i, name, value in self.attributes:
            now = getattr(call.leaves[i], name, GONE)
            if not same(now, value):
                yield f"argument {i}: planned with .{name} {value!r}, got {now!r}"
        as_planned = self.dependencies is not None and self.dependencies.unchanged(model)
        if not as_planned:
            modules = dict(model.named_modules())
            yield from self._other_modules(modules)
            tensors = _registered(modules)
            yield from self._other_parameters(tensors)
            yield from self._other_ties(tensors)
        yield from self._other_identities(model, call.leaves)
        if autocast_state() != self.autocast:
            yield f"autocast: planned {self.autocast}, got {autocast_state()} (on CPU, accelerator)"
        if any(self.autocast) and torch.is_autocast_cache_enabled() != self.keeps_casts:
            was, now = self.keeps_casts, not self.keeps_casts
            yield f"autocast: planned with cache_enabled={was}, got cache_enabled={now}"
        if self.dependencies is not None and not as_planned:
            difference = self.dependencies.difference(model, call)
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
