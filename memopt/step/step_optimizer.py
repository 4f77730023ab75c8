"""Cuts an optimizer step into one update per parameter, with its state on the device or the host.

An update narrows the optimizer's `param_groups` to its parameter, with its group's present options
(so that learning-rate schedulers work), and calls `step()`; so do several at once. This is the
ordinary step, bit for bit, for optimizers that treat every parameter on its own.

State on the host is not from a paper: ZeRO-Offload (arXiv:2101.06840) keeps state there, too, but
also updates there. Here the optimizer's own update runs on the device. Nothing overlaps: an update
fetches its parameter's state, runs, and writes it back; its time and memory are measured so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from memopt.step.backend import backend_of
from memopt.step.foreach_updates import foreach_options
from memopt.step.optimizer_state import PER_PARAMETER
from memopt.step.pinned_memory import pinned_bytes
from memopt.step.shards import like_part, local_part
from memopt.torch_private.modules import has_step_hooks, hooks_on_all_optimizers
from memopt.torch_private.tensors import any_gradient_hooks, has_gradient_hooks, version_of

Item: TypeAlias = tuple[str, torch.Tensor, torch.Tensor | None]
"""A parameter's name, its gradient, and the value that the forward gives it before."""
Run: TypeAlias = Callable[[Sequence[Item], torch.Tensor | None], None]


class Update:
    """Target of update operators. `update(name, gradient)` updates one parameter; `update(name,
    gradient, value)` first gives the parameter the forward's value; with `largest`, it updates only
    if that is finite. `together` updates several.
    """

    __name__ = "update"
    __module__ = "memopt"

    def __init__(self) -> None:
        self._run: weakref.ref[Run] | None = None

    def begin(self, run: Run) -> None:
        """Begin a train step, whose updates `run` makes. Only a weak reference to `run` is kept: a
        step that was interrupted does not seem to be running still."""
        self._run = weakref.ref(run)

    def end(self) -> None:
        """End the step."""
        self._run = None

    def run(self) -> Run | None:
        """Return the function that updates; None: no train step is running."""
        return None if self._run is None else self._run()

    def __call__(
        self,
        name: str,
        gradient: torch.Tensor,
        value: torch.Tensor | None = None,
        largest: torch.Tensor | None = None,
    ) -> None:
        """Update the parameter of that name in the captured step."""
        self.together(((name, gradient, value),), largest)

    def together(self, items: Sequence[Item], largest: torch.Tensor | None = None) -> None:
        """Update several parameters at once."""
        run = self.run()
        if run is None:
            raise RuntimeError("memopt: a parameter update outside a train step")
        run(items, largest)

    def __str__(self) -> str:
        return "update"


def _is_memopts(hook: Any) -> bool:
    """Return whether a hook is memopt's own, which may see each parameter's step
    (`memopt.wrap`'s)."""
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", "")).startswith("memopt.")


def check_splittable(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Refuse an optimizer that cannot be cut into one update per parameter.

    Raises:
        ValueError: the optimizer's class is unknown, it or a gradient has hooks, or it trains
            another model's parameters; the message names the cause and the remedy.
    """
    kind = type(optimizer)
    if kind not in PER_PARAMETER:
        known = ", ".join(one.__name__ for one in PER_PARAMETER)
        raise ValueError(
            f"{kind.__name__} cannot be cut into one update per parameter (closures, norms across "
            f"parameters, unknown rules); train steps take {known}. Plan without loss_fn=, or give "
            "the optimizer's name, to plan the module alone"
        )
    names = {id(parameter): (name, parameter) for name, parameter in named}
    for group in optimizer.param_groups:
        if any(id(parameter) not in names for parameter in group["params"]):
            raise ValueError(
                f"{kind.__name__} trains a tensor that is no parameter of the model; give each "
                "model its own optimizer, and make a loss that has parameters a part of the model "
                "(a module that holds both and returns the loss, with loss_fn=lambda loss: loss)"
            )
    check_hooks(optimizer, dict(names.values()))


def check_hooks(optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]) -> None:
    """Refuse hooks that updating each parameter by itself would call too often, or not at all.

    Raises:
        ValueError: the optimizer or a gradient has hooks, its step was replaced, or it is
            differentiable.
    """
    kind = type(optimizer)
    if has_step_hooks(optimizer):
        raise ValueError(
            f"{kind.__name__} has step hooks, which would run once per parameter; remove them"
        )
    own = vars(optimizer).get("step")
    # A learning-rate scheduler's own wrapper only notes that there was a step.
    whose = (getattr(own, "__func__", None), getattr(own, "__wrapped__", None))
    if own is not None and kind.step not in whose:
        raise ValueError(
            f"this {kind.__name__}'s step was replaced by "
            f"{getattr(own, '__qualname__', type(own).__name__)}, which would run once per "
            "parameter; put its own step back (del optimizer.step), or plan the module alone "
            "(without an optimizer instance)"
        )
    if not all(map(_is_memopts, hooks_on_all_optimizers())):
        raise ValueError(
            "there are step hooks on all optimizers (register_optimizer_step_pre_hook or "
            "..._post_hook), which would run once per parameter; remove them, or plan the module "
            "alone (without an optimizer instance)"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            f"{kind.__name__}(differentiable=True) cannot be part of a train step; leave the "
            "option out, or plan the module alone (without an optimizer instance)"
        )
    if any_gradient_hooks(named.values()):
        name = next(name for name, one in named.items() if has_gradient_hooks(one))
        raise ValueError(
            f"{name.removeprefix('model.')} has gradient hooks, which planned updates would not "
            "call; remove them, or plan the module alone (without an optimizer instance)"
        )


def group_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """Return a parameter's group of options."""
    return next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))


def update_one(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, gradient: torch.Tensor
) -> None:
    """Step one parameter, and restore the optimizer's groups."""
    group = _with_options(optimizer, group_of(optimizer, parameter), [parameter])
    group["params"] = [parameter]
    update_all(optimizer, [parameter], [gradient], Touch(optimizer, parameter), [group])


def update_all(
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.Tensor],
    gradients: Iterable[torch.Tensor],
    touch: Touch,
    groups: list[dict[str, Any]],
) -> None:
    """Step parameters at once, and restore the optimizer's groups."""
    every, states = optimizer.param_groups, touch.states
    before = [None if state is None else dict(state) for state in states]
    try:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            # Tensors changed in place keep the parameter's layout, as with autograd's own .grad.
            own = parameter if type(parameter) is nn.Parameter else local_part(parameter)
            if gradient.stride() != own.stride():
                gradient = torch.empty_like(own).copy_(gradient)
            parameter.grad = gradient if own is parameter else like_part(parameter, gradient)
        optimizer.param_groups = groups
        optimizer.step()
    except BaseException:
        # Incomplete state would never be completed.
        for i, (parameter, state, former) in enumerate(
            zip(parameters, states, before, strict=True)
        ):
            if former is None and not touch.changed(i):
                optimizer.state.pop(parameter, None)
            elif state is not None and former is not None:
                state.clear()
                state.update(former)
        raise
    finally:
        optimizer.param_groups = every
        for parameter in parameters:
            parameter.grad = None


class Groups:
    """An optimizer's groups during a step, with the options by which their parameters step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._numbers: dict[int, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            self._numbers.update(dict.fromkeys(map(id, group["params"]), number))
        self._known: dict[int, dict[str, Any]] = {}

    def of(self, parameters: Iterable[torch.Tensor]) -> list[dict[str, Any]]:
        """Return the groups with these parameters alone."""
        chosen: dict[int, list[torch.Tensor]] = {}
        for parameter in parameters:
            chosen.setdefault(self._numbers[id(parameter)], []).append(parameter)
        return [{**self._options(number), "params": own} for number, own in chosen.items()]

    def _options(self, number: int) -> dict[str, Any]:
        if number not in self._known:
            group = self._optimizer.param_groups[number]
            self._known[number] = _with_options(self._optimizer, group, group["params"])
        return self._known[number]


def _with_options(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: list[torch.Tensor]
) -> dict[str, Any]:
    return {**group, **foreach_options(type(optimizer), group, parameters)}


class Touch:
    """Tells whether a failed update has changed parameters, or their earlier states, in place.

    Attributes:
        states: the states of the parameters; None where there is none.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *parameters: torch.Tensor) -> None:
        self.states = [*map(optimizer.state.get, parameters)]
        steps = [state and state.get("step") for state in self.states]
        self._held: list[tuple[Any, ...]]
        if all(isinstance(step, torch.Tensor) for step in steps):
            # Those of `PER_PARAMETER` that count steps in tensors do so before anything else.
            self._held = [*zip(parameters, steps, strict=True)]
        else:
            pairs = zip(parameters, self.states, strict=True)
            self._held = [(one, *state.values()) if state else (one,) for one, state in pairs]
        self._versions = _versions(chain.from_iterable(self._held))
        # Fused kernels do not count versions.
        self._fused = any(group.get("fused") for group in optimizer.param_groups)

    def changed(self, position: int = 0) -> bool:
        """Return whether the update has changed one of them, or could have unnoticed."""
        begin, held = sum(map(len, self._held[:position])), self._held[position]
        return self._fused or _versions(held) != self._versions[begin : begin + len(held)]


def _versions(values: Iterable[Any]) -> list[int | None]:
    """Return how often each tensor was updated in place; None for what is no tensor."""
    listed = list(values)
    try:
        return [*map(version_of, listed)]
    except AttributeError:
        # Some optimizers keep numbers beside tensors.
        return [version_of(one) if isinstance(one, torch.Tensor) else None for one in listed]


class HostState:
    """The state of one optimizer, on the host between updates.

    `optimizer.state` holds host tensors between updates (pinned for CUDA; for a model on CPU, not
    of torch's allocator), so `state_dict()` works. Counters without dimensions stay as they are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._hosted: dict[tuple[torch.Tensor, str], torch.Tensor] = {}

    @property
    def bytes_total(self) -> int:
        """Return the bytes of state on the host now."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._hosted.values())

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Step one parameter as `update_one` does; before and after, its state is on the host."""
        self.step(parameter, gradient)
        self.put_away(parameter)

    def step(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Fetch a parameter's state and step the parameter. A failure restores the state."""
        states = self._optimizer.state
        before = states.get(parameter)
        try:
            if before is not None:
                states[parameter] = {
                    key: self._brought(parameter, key, value) for key, value in before.items()
                }
            update_one(self._optimizer, parameter, gradient)
        except BaseException:
            # The host's copies are unchanged.
            if before is None:
                states.pop(parameter, None)
            else:
                states[parameter] = before
            raise

    def leave(self) -> None:
        """Move state on the device to the host: earlier state, or state just loaded."""
        for parameter in list(self._optimizer.state):
            self.put_away(parameter)

    def settle(self) -> None:
        """Wait until the state written back can be read."""
        for device in {parameter.device for parameter, _ in self._hosted}:
            runtime = backend_of(device).runtime
            if runtime is not None:
                runtime.current_stream(device).synchronize()

    def come_back(self) -> None:
        """Move all state back to its parameter's device, for `optimizer.step()`."""
        for parameter, state in self._optimizer.state.items():
            for key in self._movable(state):
                state[key] = self._brought(parameter, key, state[key])
        self._hosted.clear()

    def _brought(self, parameter: torch.Tensor, key: str, value: Any) -> Any:
        """Return a device copy of state on the host; everything else as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        own, device = local_part(value), local_part(parameter).device
        away = own.dim() > 0 and own.device != device
        if away or own is self._hosted.get((parameter, key)):
            there = torch.empty_strided(own.size(), own.stride(), dtype=own.dtype, device=device)
            return like_part(value, there.copy_(own, non_blocking=True))
        # An update changes a counter in place: copy it, so that a failure changes nothing.
        return value.clone() if value.dim() == 0 else value

    def put_away(self, parameter: torch.Tensor) -> None:
        """Move a parameter's state to the host. Counters stay as they are."""
        state = self._optimizer.state[parameter]
        for key in self._movable(state):
            value = local_part(state[key])
            host = self._hosted.get((parameter, key))
            if value is host:
                continue
            if host is None or (host.size(), host.dtype) != (value.size(), value.dtype):
                host = host_like(value, parameter.device)
                self._hosted[parameter, key] = host
            # In the compute stream's order, like the copy that fetches it for the next update.
            host.copy_(value, non_blocking=True)
            state[key] = like_part(state[key], host)

    def _movable(self, state: dict[str, Any]) -> list[str]:
        return [k for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim() > 0]


def host_like(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return host memory for a device's tensor: pinned, or for CPU outside torch's allocator."""
    size_bytes = value.untyped_storage().nbytes()
    empty = torch.empty(0, dtype=value.dtype, device="cpu")
    if not backend_of(device).on_host:
        span = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
        pinned = pinned_bytes((1 + span) * value.itemsize if value.numel() else 0, device)
        return empty.set_(pinned.untyped_storage(), 0, value.size(), value.stride())
    storage = torch.from_numpy(np.empty(size_bytes, dtype=np.uint8)).untyped_storage()
    return empty.set_(storage, 0, value.size(), value.stride())
