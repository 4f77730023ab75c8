"""Measures the baseline, that is the unplanned step, and the memory of the user's own loss.

Measuring leaves the user's objects as they were, see `memopt.user_code.restored_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from memopt.models.record import ANY_LOSS, OutputGradients
from memopt.models.step_rules import PLAIN, StepRules
from memopt.pricing.memory import library_bytes, metered
from memopt.step.backend import backend_of, random_state_kept
from memopt.step.dropped_outputs import unread
from memopt.step.inputs import Call
from memopt.step.loss import Loss, differentiable
from memopt.step.model_outputs import gradients_of, in_memory_of_its_own, tangent_of
from memopt.step.profiled import Baseline
from memopt.step.ranks import alone, largest, meet
from memopt.step.step_time import median_step_s
from memopt.step.unheard import unheard
from memopt.torch_private import pytree
from memopt.torch_private.modes import backward_owns_tangents
from memopt.user_code.own_backward import OwnBackward, reaches
from memopt.user_code.reached_state import ReachedState
from memopt.user_code.restored_state import state_restored

LARGEST_NUMBER_BYTES = 64
"""Bytes that torch allocates for a loss that is one number, at most."""
_MOST_METERED = 5


def backward(output: Any, loss: Loss | None, run: OwnBackward) -> None:
    """Run the step after the forward: the user's loss, or unit tangents for every output. The
    backward itself runs outside a loop's `with torch.autocast`."""
    if loss is not None:
        run([loss.value(output)])
        return
    tensors = list(differentiable(output).values())
    run(tensors, [torch.ones_like(t) for t in tensors])


def measure_baseline(
    model: nn.Module,
    call: Call,
    loss: Loss | None,
    device: torch.device,
    optimizer: torch.optim.Optimizer | None = None,
    rules: StepRules = PLAIN,
) -> Baseline:
    """Measure the unplanned step. The first step warms up, the next ones are timed, the last
    ones metered (after a metered step memory is new, which takes time). What a module's step
    returns is held while a metered step ends.

    Args:
        model: the user's model, in its mode.
        call: the example call.
        loss: the user's loss, if known.
        device: where the model is.
        optimizer: for a whole training step, its `step` and `zero_grad` are run; None: forward,
            loss and backward alone.
        rules: what a whole step does between its backward and its updates.

    Returns:
        The baseline; its peak counts bytes above those resident.
    """
    call = call.detached()
    meet()
    loss = loss and loss.detached()
    parts = loss.parts if loss else ()  # in whole steps the loss itself clears its arguments
    world = ReachedState(() if optimizer else (model, call.args, call.kwargs, *parts))

    def clear() -> None:
        clear_gradients(model, () if optimizer else call.tensors())
        world.restore()

    with state_restored(model, call, *parts, optimizer) as kept:
        step = _unplanned_step(model, call, loss, optimizer, rules, kept.backward)
        clear()
        with kept.first_run():
            step()
        time_s = median_step_s(step, clear, device)
        clear()
        peak_bytes = _peak_bytes(step, clear, device)
        return Baseline(peak_bytes, time_s, True, library_bytes(device))


def _peak_bytes(step: Callable[[], Any], clear: Callable[[], None], device: torch.device) -> int:
    """Meter steps; return the most bytes above those resident on any rank. gloo's thread now and
    then frees what it has sent late, so that the least peak that ranks measure twice counts."""
    found: list[int] = []
    again = 1.0
    while again:
        with metered(device) as use:
            held = step()
        del held
        clear()
        found.append(use.peak_bytes)
        sure = found.count(min(found)) > 1 or len(found) == _MOST_METERED
        sure = sure or alone() or not backend_of(device).on_host
        (again,) = largest([float(not sure)])
    (peak_bytes,) = largest([min(found)])
    return int(peak_bytes)


def _unplanned_step(
    model: nn.Module,
    call: Call,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer | None,
    rules: StepRules,
    run_backward: OwnBackward,
) -> Callable[[], Any]:
    """Return the step that `measure_baseline` measures; it returns what a loop holds at its end."""
    if optimizer is not None and loss is not None:
        return eager_step(model, call, loss.value, optimizer, rules, run_backward)

    @unheard()
    def step() -> Any:
        given = call.detached()
        output = model(*given.args, **given.kwargs)
        if loss is not None and loss.alone:
            output = loss.value(output)
            run_backward([output])
        else:
            backward(output, loss, run_backward)
        return output

    return step


def clear_gradients(model: nn.Module, inputs: Iterable[torch.Tensor] = ()) -> None:
    """Drop the gradients of parameters and inputs, as before a step."""
    for tensor in (*model.parameters(), *inputs):
        if tensor.is_leaf:
            tensor.grad = None


@dataclass(frozen=True)
class OutputTree:
    """A model's output without its differentiable tensors.

    Attributes:
        leaves: the other leaves at their places; None in place of a differentiable tensor.
        ranks: for each leaf, its number among the differentiable tensors; None: it is none of them.
        spec: the pytree structure.
    """

    leaves: list[Any]
    ranks: list[int | None]
    spec: pytree.TreeSpec

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the output with these tensors in place of its differentiable ones, by rank."""
        return pytree.tree_unflatten(self.leaves_with(tensors), self.spec)

    def leaves_with(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Return the leaves of the output `with_tensors` makes."""
        pairs = zip(self.leaves, self.ranks, strict=True)
        return [leaf if rank is None else tensors[rank] for leaf, rank in pairs]


def cut_output(output: Any) -> tuple[OutputTree, list[torch.Tensor]]:
    """Return an output without its differentiable tensors, and these tensors, each once."""
    leaves, spec = pytree.tree_flatten(output)
    tensors = list(differentiable(output).values())
    rank = {id(tensor): i for i, tensor in enumerate(tensors)}
    ranks = [rank.get(id(leaf)) for leaf in leaves]
    others = [leaf if i is None else None for leaf, i in zip(leaves, ranks, strict=True)]
    return OutputTree(others, ranks, spec), tensors


@dataclass(frozen=True)
class LossUse:
    """The memory that the user's loss needs at its boundary, and the gradients that it gives.

    Attributes:
        boundary_bytes: its peak, without outputs, tangents and the previous step's loss.
        gradients: the outputs that get no gradient, and the layouts of the others' gradients.
        kept_bytes: of the loss value, if it takes more than a number does. Training loops hold it
            until the next step's loss replaces it: `mse_loss` and some others return a number in a
            storage as large as the output.
    """

    boundary_bytes: int = 0
    gradients: OutputGradients = ANY_LOSS
    kept_bytes: int = 0


@dataclass(frozen=True)
class _Arrivals:
    """The gradients that a loss hands to differentiable outputs, by their rank.

    Attributes:
        own: ranks of the model's own inputs and parameters; autograd keeps their gradients.
        gradients: as the planned backward gets them.
        held: (address, bytes) of memory besides the gradients that lives to the end of the step.
    """

    own: frozenset[int]
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    held: set[tuple[int, int]] = field(default_factory=set)


class _Boundary(torch.autograd.Function):
    """An autograd function that replaces the model: it returns the model's outputs, and its
    backward receives their gradients as a planned backward would."""

    boxed_grads_call = True

    @staticmethod
    def forward(
        ctx: Any, arrivals: _Arrivals, _reached: torch.Tensor, *values: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.arrivals, ctx.values = arrivals, values
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[None, ...]:
        # torch 2.11 does not know `boxed_grads_call`, and keeps the gradients that it hands over.
        owned = backward_owns_tangents()
        gradients: list[Any] = given[0] if owned else list(given)
        arrivals: _Arrivals = ctx.arrivals
        before = [None if g is None else _storage(g) for g in gradients]
        tangents = [
            g if g is None or i in arrivals.own else tangent_of(g, value)
            for i, (g, value) in enumerate(zip(gradients, ctx.values, strict=True))
        ]
        gradients.clear()
        for i, memory in enumerate(before):
            tangent, tangents[i] = tangents[i], None
            if tangent is None or memory is None:
                continue
            size_bytes = tangent.nbytes
            own = i in arrivals.own
            made = tangent if own else in_memory_of_its_own(tangent)
            del tangent
            arrivals.gradients[i] = made
            copied = memory != _storage(made)
            if (own and memory[1] > size_bytes) or (copied and not owned):
                arrivals.held.add(memory)
        return None, None, *(None for _ in tangents)


def _storage(value: torch.Tensor) -> tuple[int, int]:
    """Return a tensor's address and its storage's bytes."""
    storage = value.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _dropped(
    loss: Loss, tree: OutputTree, values: Sequence[torch.Tensor], gradients: OutputGradients
) -> tuple[int, ...]:
    """Return the outputs that the loss does not read, by their leaf numbers."""
    given = [value.requires_grad_() for value in values]

    def value(output: Any) -> torch.Tensor:
        with random_state_kept(value.device for value in values):
            return loss.value(output).detach()

    leaves = tree.leaves_with(given)
    useful = [i for i, rank in enumerate(tree.ranks) if rank is not None]
    useful = [i for i in useful if i not in gradients.unused]
    return unread(
        value, leaves, tree.spec, useful, partial(torch.allclose, rtol=0, atol=0, equal_nan=True)
    )


def loss_text(loss: Loss) -> str | None:
    """Return a text that identifies a loss; None if there is none (closures, partials...)."""
    if isinstance(loss.function, nn.Module):
        return repr(loss)
    code = getattr(loss.function, "__code__", None)
    if not code or getattr(loss.function, "__closure__", None):
        return None
    return f"{code.co_code.hex()} {code.co_consts!r} {code.co_names!r}"


def _goes_on(
    loss: Loss, tree: OutputTree, values: Sequence[torch.Tensor], model: nn.Module
) -> bool:
    """Return whether a loss depends on the model's parameters other than through its outputs
    (through tensors that the forward left behind, say)."""
    cut = tree.with_tensors([value.detach().requires_grad_() for value in values])
    return reaches(loss.value(cut), model.parameters())


def measure_loss(model: nn.Module, call: Call, loss: Loss, device: torch.device) -> LossUse:
    """Run the loss, forward and backward, on detached outputs of the model, if any has a
    gradient."""
    loss = loss.detached()
    with state_restored(model, call, *loss.parts) as kept:
        world = ReachedState((model, call.args, call.kwargs, *loss.parts))
        with kept.first_run(), unheard():
            output = model(*call.args, **call.kwargs)
        tree, found = cut_output(output)
        if not found:
            return LossUse()
        given = {id(tensor) for tensor in (*model.parameters(), *call.tensors())}
        arrivals = _Arrivals(frozenset(i for i, value in enumerate(found) if id(value) in given))
        values = [value.detach() for value in found]
        del output, found
        with kept.first_run():
            goes_on = _goes_on(loss, tree, values, model)
        if goes_on:  # run again, without that graph
            world.restore()
            with kept.first_run(), unheard(), torch.no_grad():
                model(*call.args, **call.kwargs)
        # Twice, since a training loop holds the previous step's loss while it computes the next.
        with metered(device) as use:
            for _ in range(2):
                arrivals.gradients.clear()
                arrivals.held.clear()
                reached = torch.empty(0, requires_grad=True, device="cpu")
                cut = _Boundary.apply(arrivals, reached, *values)  # type: ignore[no-untyped-call]
                with kept.first_run():
                    value = loss.value(tree.with_tensors(cut))
                kept.backward([value])
        found_bytes = sum(gradient.nbytes for gradient in arrivals.gradients.values())
        held_bytes = sum(size_bytes for _, size_bytes in arrivals.held)
        gradients = gradients_of(tree.ranks, arrivals.gradients, held_bytes)
        if loss.alone:
            gradients = replace(gradients, dropped=_dropped(loss, tree, values, gradients))
        kept_bytes = value.untyped_storage().nbytes()
        made_bytes = kept_bytes * (_storage(value) not in map(_storage, values))
    boundary_bytes = max(0, use.peak_bytes - found_bytes - held_bytes - made_bytes)
    kept_bytes *= kept_bytes > LARGEST_NUMBER_BYTES
    return LossUse(boundary_bytes, gradients, kept_bytes)


def eager_step(
    model: nn.Module,
    call: Call,
    loss_of: Callable[[Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    rules: StepRules,
    run_backward: OwnBackward,
) -> Callable[[], None]:
    """Make the eager step, which takes the same batch for each of its micro-batches."""
    device = next((p.device.type for p in model.parameters()), "cpu")
    scaler = torch.amp.GradScaler(device, init_scale=1.0, enabled=rules.scaled)
    if rules.scaled:
        scaler.scale(torch.zeros((), device=device))

    @unheard()
    def step() -> None:
        for _ in range(rules.micro_batches):
            given = call.detached()
            value = loss_of(model(*given.args, **given.kwargs))
            if rules.micro_batches > 1:
                value = value / rules.micro_batches
            value = scaler.scale(value)
            run_backward([value])
            del value
        if rules.scaled:
            scaler.unscale_(optimizer)
        if rules.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), rules.clip_norm, rules.norm_type)
        # A scheduler's wrapper around step() must not count these steps.
        type(optimizer).step(optimizer)
        optimizer.zero_grad(set_to_none=True)
        scaler.update(1.0)

    return step
