"""One model, several programs: every planned step must equal the unplanned one, bit for bit."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from memopt.capture.capture import capture
from memopt.executor import random_state
from memopt.executor.apply import runtime_of
from memopt.executor.install import install
from memopt.executor.module import PlannedModule
from memopt.executor.out_variants import allocator_owned
from memopt.models.graph import Graph
from memopt.passes.passes import place_program
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import (
    Compute,
    DropHost,
    Free,
    Instruction,
    LossBoundary,
    Program,
    SwapIn,
    SwapOut,
)
from memopt.programs.liveness import computes, store_all, with_frees
from memopt.programs.validate import validate
from memopt.step.build import Lowering, build
from memopt.step.captured import Captured
from memopt.step.inputs import Call, to_call


def recompute_all(graph: Graph) -> Program:
    """Every recomputable forward operator runs again, in order, before the backward."""
    forward = range(graph.first_backward)
    again = [i for i in forward if graph.operators[i].recomputable]
    backward = range(graph.first_backward, len(graph.operators))
    return Program(with_frees(graph, computes(graph, [*forward, None, *again, *backward])))


def recompute_late(graph: Graph) -> Program:
    """Each backward operator is preceded by the recomputation of all that it reads, unless that
    may run only once; nothing recomputable survives from the forward."""
    forward = graph.first_backward
    order: list[int | None] = [*range(forward), None]
    for index in range(forward, len(graph.operators)):
        needed: set[int] = set()
        stack = list(graph.operators[index].reads)
        while stack:
            producer = graph.producer.get(stack.pop())
            if producer is None or producer >= forward or producer in needed:
                continue
            if graph.operators[producer].recomputable:
                needed.add(producer)
                stack.extend(graph.operators[producer].reads)
        order += [*sorted(needed), index]
    return Program(with_frees(graph, computes(graph, order)))


def swap_all(graph: Graph) -> Program:
    """Whatever crosses the loss boundary, and may leave the device, does: out after its last
    forward use, back before its first backward use."""
    instructions = list(store_all(graph))
    boundary = next((i for i, x in enumerate(instructions) if isinstance(x, LossBoundary)), None)
    if boundary is None:
        return Program(instructions)
    live: set[int] = set()
    for instruction in instructions[:boundary]:
        if isinstance(instruction, Compute):
            live.update(instruction.outputs)
        elif isinstance(instruction, Free):
            live.discard(instruction.tensor)
    swapped = sorted(live - graph.kept)
    head: list[Instruction] = []
    for instruction in instructions[:boundary]:
        head.append(instruction)
        if isinstance(instruction, Compute):
            head += [SwapOut(t) for t in instruction.outputs if t in swapped]
    head += [Free(t) for t in swapped]
    tail: list[Instruction] = []
    waiting = set(swapped)
    for instruction in instructions[boundary + 1 :]:
        if isinstance(instruction, Compute):
            for tensor in graph.operators[instruction.op].reads:
                if tensor in waiting:
                    waiting.remove(tensor)
                    tail += [SwapIn(tensor), DropHost(tensor)]
        tail.append(instruction)
    return Program([*head, LossBoundary(), *tail])


def in_place(graph: Graph) -> Program:
    """Every recomputable forward operator runs again, and what can be is computed in place."""
    return with_in_place(graph, recompute_all(graph))


def placed(graph: Graph) -> Program:
    """Recomputed late and in place, at addresses of one arena."""
    return place_program(graph, with_in_place(graph, recompute_late(graph)))[0]


PROGRAMS: dict[str, Callable[[Graph], Program]] = {
    "store_all": store_all,
    "recompute_all": recompute_all,
    "recompute_late": recompute_late,
    "swap_all": swap_all,
    "in_place": in_place,
    "placed": placed,
}


@dataclass(frozen=True)
class Prepared:
    """A captured model, to install programs in."""

    model: nn.Module
    captured: Captured
    lowering: Lowering

    @property
    def graph(self) -> Graph:
        return self.lowering.graph

    def planned(
        self, program: str | Program = "store_all", interpreted: bool = False
    ) -> PlannedModule:
        """The model under a program, checked by the validator first."""
        if isinstance(program, str):
            program = PROGRAMS[program](self.graph)
        violation = validate(self.graph, program)
        assert violation is None, violation
        installed = install(self.captured, self.lowering, program, interpreted=interpreted)
        return PlannedModule(self.model, self.captured, runtime_of(self.captured), installed)

    @property
    def waiting(self) -> int:
        """How many steps hold state for a backward that has not come."""
        return len(runtime_of(self.captured))


def prepare(model: nn.Module, inputs: Any) -> Prepared:
    """Capture a model for a call; nothing is measured."""
    captured = capture(model, to_call(inputs))
    lowering = build(model, captured)
    graph = replace(lowering.graph, allocator_owned=allocator_owned(lowering))
    return Prepared(model, captured, replace(lowering, graph=graph))


def sum_of_outputs(output: Any) -> Tensor:
    """A scalar that gives every differentiable output another gradient."""
    total = torch.zeros(())
    for position, leaf in enumerate(pytree.tree_leaves(output)):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            weights = torch.linspace(0.5, 1.5, leaf.numel()).reshape(leaf.shape)
            total = total + (position + 1) * (leaf.float() * weights).sum()
    return total


@dataclass(frozen=True)
class Case:
    """A model that every planned step is compared on.

    Attributes:
        model: makes the model; called after seeding.
        inputs: makes the arguments: a tuple or a dict.
        loss: scalar of the output.
        steps: how many steps to compare, each with an update of the parameters.
        training: the mode.
        context: entered around each forward (autocast...).
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    loss: Callable[[Any], Tensor] = sum_of_outputs
    steps: int = 2
    training: bool = True
    context: Callable[[], Any] = field(default=torch.enable_grad)


Record = list[tuple[str, Any]]


def run_steps(case: Case, module: nn.Module, model: nn.Module) -> Record:
    """Train a few steps through `module`; everything that a step leaves behind, named."""
    record: Record = []
    for step in range(case.steps):
        torch.manual_seed(100 + step)
        call = to_call(case.inputs())
        before = call.leaves
        leaves = [v for v in before if isinstance(v, Tensor) and v.requires_grad]
        if step:
            # Other values than the captured ones; integer inputs stay.
            with torch.no_grad():
                for leaf in before:
                    if isinstance(leaf, Tensor) and leaf.is_floating_point():
                        leaf.mul_(1.25)
        with case.context():
            output = module(*call.args, **call.kwargs)
        record += [(f"step {step} {name}", v) for name, v in describe_output(output, call)]
        loss = case.loss(output)
        if step == case.steps - 1:
            # What this one saves for its backward is not written over: the next reads it, too.
            loss.backward(retain_graph=True)
        loss.backward()
        del loss
        record += [(f"step {step} input {i}", v) for i, v in enumerate(snapshot(before))]
        record += [
            (f"step {step} gradient of input {i}", None if v.grad is None else v.grad.clone())
            for i, v in enumerate(leaves)
        ]
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            record.append((f"step {step} gradient of {name}", snapshot([gradient])[0]))
            if gradient is not None:
                with torch.no_grad():
                    parameter.sub_(0.05 * gradient)
                parameter.grad = None
        record += [
            (f"step {step} {name}", v) for name, v in snapshot_named(model.state_dict().items())
        ]
        record.append((f"step {step} random state", torch.random.get_rng_state()))
    return record


def snapshot(values: list[Any]) -> list[Any]:
    """Copies of tensors, other values as they are."""
    return [v.detach().clone() if isinstance(v, Tensor) else v for v in values]


def snapshot_named(items: Any) -> list[tuple[str, Any]]:
    return [(name, snapshot([value])[0]) for name, value in items]


def is_generator_free() -> bool:
    """Whether another thread gets the lock of the random generator."""
    free: list[bool] = []

    def other_thread() -> None:
        free.append(random_state._lock.acquire(timeout=1.0))
        if free[0]:
            random_state._lock.release()

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    return free[0]


def describe_output(output: Any, call: Call) -> Record:
    """Structure, values, and which storages the output shares with the inputs and itself."""
    leaves, spec = pytree.tree_flatten(output)
    record: Record = [("output structure", spec), ("output type", type(output))]
    inputs = [v for v in call.leaves if isinstance(v, Tensor)]
    for i, leaf in enumerate(leaves):
        record.append((f"output {i}", snapshot([leaf])[0]))
        if isinstance(leaf, Tensor):
            record.append((f"output {i} requires_grad", leaf.requires_grad))
            record.append((f"output {i} is input", [leaf is v for v in inputs]))
            record.append((f"output {i} shares with input", [_shares(leaf, v) for v in inputs]))
            others = [v for v in leaves if isinstance(v, Tensor)]
            record.append((f"output {i} shares with output", [_shares(leaf, v) for v in others]))
    return record


def _shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _bits(value: Tensor) -> Tensor:
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same(found: Record, expected: Record, label: str) -> None:
    """Equal values of equal names; tensors by dtype, layout and bits."""
    assert [name for name, _ in found] == [name for name, _ in expected], label
    for (name, a), (_, b) in zip(found, expected, strict=True):
        where = f"{label}: {name}"
        if not isinstance(b, Tensor):
            assert a == b, f"{where}: {a!r}, unplanned {b!r}"
            continue
        assert isinstance(a, Tensor), f"{where}: {a!r}, unplanned a tensor"
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        assert a.stride() == b.stride(), f"{where}: stride {a.stride()}, unplanned {b.stride()}"
        assert torch.equal(_bits(a), _bits(b)), f"{where}: differs by {(a - b).abs().max()}"


def check(case: Case) -> None:
    """Compare the case's steps under every program, both ways, with the unplanned ones."""
    torch.manual_seed(0)
    model = case.model().train(case.training)
    torch.manual_seed(1)
    start = copy.deepcopy(model.state_dict())
    reference = copy.deepcopy(model)
    expected = run_steps(case, reference, reference)
    torch.manual_seed(1)
    with case.context():
        prepared = prepare(model, case.inputs())
        ways = [
            (f"{name}{' interpreted' * i}", prepared.planned(name, bool(i)))
            for name in PROGRAMS
            for i in (0, 1)
        ]
    for label, planned in ways:
        model.load_state_dict(start)
        for parameter in model.parameters():
            parameter.grad = None
        found = run_steps(case, planned, model)
        assert_same(found, expected, label)
        assert prepared.waiting == 0, f"{label}: the state of a step is left behind"
