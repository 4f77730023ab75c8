"""Keeps parameters and optimizer state on the host between planned steps.

Between steps a moved parameter's `.data`, and its tensors in `optimizer.state`, are its host
copies (pinned, or on CPU memory that is not torch's allocator's): `state_dict()`, checkpoints and
averages read them as they are. A step swaps in device copies; an update changes those, and its
result overwrites the host copy only when it is complete, so that an update that fails has changed
nothing. An update on the host changes the host copies themselves.

A plan for repeated steps can leave tensors on the device between steps. Then the model (or the
optimizer) holds the device copy until the next step has copied it to the host. Between steps no
copy is under way, and every tensor has one current value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memopt.executor.host_updates import HostUpdates, RunStep, gradient_of
from memopt.executor.swap import StoredTensor, ThreadSwap
from memopt.executor.swap_streams import StreamSwap
from memopt.programs.instructions import Program
from memopt.programs.moved import carried_over, moved_tensors
from memopt.step.backend import backend_of
from memopt.step.build import Lowering
from memopt.step.movable import state_name
from memopt.step.shards import data_of, like_part, local_part, set_data
from memopt.step.step_parts import StepParts


class Homes:
    """Host and device copies of the parameters and state that one train step moves.

    Attributes:
        parameters: moved parameter's tensor → the parameter.
        states: moved state's tensor → the parameter whose state it is.
        swap: makes the copies; set when the program is installed.
        carried: tensors that stay on the device from one step to the next.
    """

    def __init__(
        self,
        parts: StepParts,
        lowering: Lowering,
        program: Program,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._optimizer, self._lowering = optimizer, lowering
        self._device = parts.captured.device or torch.device("cpu")
        self._host = HostUpdates(optimizer, self._device)
        self.swap: ThreadSwap | StreamSwap | None = None
        moved = moved_tensors(lowering.graph, program)
        self.carried = carried_over(lowering.graph, program)
        self._named = named = dict(parts.module.named_parameters(remove_duplicate=False))
        self.parameters: dict[int, nn.Parameter] = {}
        self.states: dict[int, nn.Parameter] = {}
        for primal in parts.captured.primals:
            index = lowering.storages[primal.node][0]
            if index in moved:
                self.parameters[index] = named[primal.name]
        numbers = {lowering.graph.tensors[t].name: t for t in moved}
        for site in parts.sites:
            index = numbers.get(state_name(site.name.removeprefix("model.")))
            if index is not None:
                self.states[index] = named[site.name]
        self._tensors = {id(p): t for t, p in self.parameters.items()}
        self._state_tensors = {id(p): t for t, p in self.states.items()}
        self._copies: dict[tuple[int, str], StoredTensor] = {}
        self._views: dict[tuple[int, str], torch.Tensor] = {}
        self._there: dict[int, dict[str, torch.Tensor]] = {}
        """Device copies by tensor; a parameter's has the key ""."""
        self._stale: set[int] = set()
        """Tensors whose new value is not complete on the host."""
        self._changed: set[int] = set()
        """Tensors that the host has updated in this step."""
        self._updated: set[int] = set()
        """Tensors that the device has."""
        self._begun: Callable[[], None] | None = None

    def __bool__(self) -> bool:
        return bool(self.parameters or self.states)

    @property
    def bytes_total(self) -> int:
        """Bytes that are on the host now."""
        return sum(view.untyped_storage().nbytes() for view in self._views.values())

    def leave(self, *, carried: bool = False) -> None:
        """Copy moved tensors to the host that are not there: before the first step, and after they
        were loaded or replaced. With `carried`, also those that begin a step on the device."""
        tensors = (*self.parameters, *self.states)
        copied = [self._leave(one) for one in tensors if carried or one not in self.carried]
        if any(copied):  # after a step nothing is, and the host need not wait again
            self._synchronize()

    def moves(self, parameter: torch.Tensor) -> bool:
        """Return whether steps move a parameter."""
        return id(parameter) in self._tensors

    def begin(self, begun: Callable[[], None], run: RunStep) -> None:
        """Begin a train step. `begun` is called before the first update on the host starts, `run`
        by its thread for each update."""
        self._begun = begun
        self._host.begin(run)

    def update(self, op: int, stored: StoredTensor) -> None:
        """Let the host run an update once the host copy of its gradient is complete."""
        assert self._begun is not None
        self._begun()
        name, node, gradient = gradient_of(self._lowering, op)
        parameter = self._named[name]
        copied = gradient, stored
        self._host.submit(name, parameter, node.meta["val"], copied, self._swap)
        for found in (self._tensors, self._state_tensors):
            self._changed.update(t for key, t in found.items() if key == id(parameter))

    def updated(self, gradient: int) -> None:
        """Wait for the host's update that reads a gradient."""
        self._host.wait(gradient)

    def stop(self) -> None:
        """Start no further updates on the host in this step, and wait for the running one."""
        self._host.stop()

    def resume(self, tensor: int) -> torch.Tensor | None:
        """Begin a step with a tensor on the device, fetched if its value is on the host (before the
        first step, or after a failed one); return a parameter's device copy."""
        there = self._there[tensor] = dict[str, torch.Tensor]()
        for key, value in self._values(tensor).items():
            home = self._is_home(tensor, key, value)
            copy = self._copies[tensor, key] if home else None
            there[key] = value.to(self._device) if copy is None else self._swap.bring(copy)  # type: ignore[arg-type]
        self._stale.add(tensor)
        self.wait(tensor)
        return there.get("")

    def bring(self, tensor: int) -> torch.Tensor | None:
        """Start fetching a tensor; return a parameter's device copy. State that does not exist yet
        is made by its update."""
        swap, brought = self._swap, dict[str, torch.Tensor]()
        self._there[tensor] = brought
        self._host.until((self.parameters if tensor in self.parameters else self.states)[tensor])
        for key in self._values(tensor):
            brought[key] = swap.bring(self._copies[tensor, key])  # type: ignore[arg-type]
        return brought.get("")

    def wait(self, tensor: int) -> None:
        """Wait until a tensor's copies under way are complete."""
        for key in self._there.get(tensor, ()):
            self._wait(tensor, key)

    def back(self, tensor: int) -> None:
        """Start copying the new values over the host copies."""
        for key, value in self._there[tensor].items():
            self._store(tensor, key, value)

    def drop(self, tensor: int) -> None:
        """Drop a tensor's device copy."""
        self.wait(tensor)
        self._there.pop(tensor, None)
        self._stale.discard(tensor)
        self._show(tensor)

    @contextmanager
    def updating(self, parameter: nn.Parameter) -> Iterator[None]:
        """Let the model and the optimizer hold the device copies of a parameter and its state
        inside; if that or the block fails, the copies that they held before."""
        own, state = self._tensors.get(id(parameter)), self._state_tensors.get(id(parameter))
        states, data = self._optimizer.state, data_of(parameter)
        before = states.get(parameter)
        try:
            if own is not None:
                set_data(parameter, self._there[own][""])
            if state is not None and before is not None:
                # A counter is changed in place: copy it, so that a failure changes nothing.
                counters = {k: v.clone() for k, v in before.items() if _is_counter(v)}
                there = {k: like_part(before[k], v) for k, v in self._there[state].items()}
                states[parameter] = {**before, **counters, **there}
            yield
        except BaseException:
            set_data(parameter, data)
            if state is not None and before is not None:
                states[parameter] = before
            elif state is not None:
                states.pop(parameter, None)
            raise
        if state is not None:
            self._there[state] = _movable(states.get(parameter, {}))
        done = {one for one in (own, state) if one is not None}
        self._stale |= done
        self._updated |= done

    def restores(self, parameter: nn.Parameter) -> bool:
        """Return whether a failed update of this parameter changes nothing."""
        has_state = bool(_movable(self._optimizer.state.get(parameter, {})))
        own = id(parameter) in self._tensors
        return own and (id(parameter) in self._state_tensors or not has_state)

    def settle(self, *, complete: bool = False, undone: bool = False) -> None:
        """End a step, complete or failed: copy updates to the host and drop device copies, except
        those that the next step begins with, if this step is complete. After a failed step also end
        the copies of activations that nobody waits for, since they hold memory. With `undone`, what
        was updated is about to be restored: nothing is copied, which may be what has failed."""
        self.stop()
        for tensor in self.carried if complete else ():
            self._there.pop(tensor, None)
            self._stale.discard(tensor)
        for tensor in list(self._there):
            updated = tensor in self._stale
            for key, value in self._there[tensor].items():
                try:
                    self._wait(tensor, key)
                except (RuntimeError, OSError, MemoryError):
                    # A copy to the host failed, or one from it, which is then not needed.
                    updated = updated or self._is_shown(tensor, key, value)
                if updated and not undone:
                    self._write(tensor, key, value)
            self._stale.discard(tensor)
            self._there.pop(tensor)
            # One that the step began with on the device is still held there.
            if not undone or (tensor in self._updated and (tensor, "") in self._views):
                self._show(tensor)
        self._updated.clear()
        while self._changed:
            self._leave(self._changed.pop())
        if not complete and self.swap is not None:
            self.swap.settle()
        self._synchronize()

    def _leave(self, tensor: int) -> bool:
        """Copy to the host the values of a tensor that are not there; return whether any is."""
        copied = False
        for key, value in self._values(tensor).items():
            known = value is self._views.get((tensor, key))
            if not known and not self._is_home(tensor, key, value):
                self._store(tensor, key, value)
                self._wait(tensor, key)
                copied = True
        self._show(tensor)
        return copied

    def _synchronize(self) -> None:
        """Wait until copies to the host can be read there."""
        runtime = backend_of(self._device).runtime
        if runtime is not None and self:
            runtime.current_stream(self._device).synchronize()

    @property
    def _swap(self) -> ThreadSwap | StreamSwap:
        assert self.swap is not None
        return self.swap

    def _values(self, tensor: int) -> dict[str, torch.Tensor]:
        """Return a tensor's values as the model or the optimizer has them now, by the state's key
        ("" for a parameter)."""
        if tensor in self.parameters:
            return {"": data_of(self.parameters[tensor])}
        return _movable(self._optimizer.state.get(self.states[tensor], {}))

    def _is_home(self, tensor: int, key: str, value: torch.Tensor) -> bool:
        view = self._views.get((tensor, key))
        return view is not None and view.data_ptr() == value.data_ptr() and _alike(view, value)

    def _is_shown(self, tensor: int, key: str, value: torch.Tensor) -> bool:
        """Return whether the model holds the device copy, as it does once that has been updated."""
        held = self._values(tensor).get(key)
        return held is not None and held.data_ptr() == value.data_ptr()

    def _store(self, tensor: int, key: str, value: torch.Tensor) -> None:
        """Start copying a value to the host, over the former one."""
        view = self._views.get((tensor, key))
        if view is not None and _alike(view, value):
            self._swap.store(self._copies[tensor, key], value)  # type: ignore[arg-type]
            return
        # Another step of this model may have left it on the host: it comes from the device, too.
        copy = self._copies[tensor, key] = self._swap.out(value.to(self._device))
        self._views[tensor, key] = self._swap.host_view(copy)  # type: ignore[arg-type]

    def _write(self, tensor: int, key: str, value: torch.Tensor) -> None:
        """Copy a value to the host now."""
        if (tensor, key) not in self._views:
            self._store(tensor, key, value)
            self._wait(tensor, key)
        self._views[tensor, key].copy_(value)

    def _wait(self, tensor: int, key: str) -> None:
        if (tensor, key) in self._copies:
            self._swap.wait(self._copies[tensor, key])  # type: ignore[arg-type]

    def _show(self, tensor: int) -> None:
        """Let the model, or the optimizer, hold the host copies."""
        if tensor in self.parameters:
            set_data(self.parameters[tensor], self._views[tensor, ""])
            return
        state = self._optimizer.state.get(self.states[tensor], {})
        state.update({k: like_part(state[k], self._views[tensor, k]) for k in _movable(state)})


@contextmanager
def tensors_on(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Move a module's parameters and buffers to a device for the block. Those already there are
    shared; the others are copied and go back afterwards, with all changes."""
    before = [(one, data_of(one)) for one in (*module.parameters(), *module.buffers())]
    moved = [(one, data) for one, data in before if data.device.type != device.type]
    try:
        for one, data in moved:
            set_data(one, data.to(device))
        yield
    finally:
        for one, data in moved:
            data.copy_(data_of(one))
            set_data(one, data)


def _movable(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim() > 0}
    return {key: local_part(value) for key, value in tensors.items()}


def _is_counter(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.size(), one.stride(), one.dtype) == (other.size(), other.stride(), other.dtype)
