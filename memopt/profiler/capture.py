"""Capture: one joint forward+backward ATen graph of any nn.Module, wrapped once in AOTAutograd.

Nothing is computed: dynamo and AOTAutograd trace fake tensors that share the real parameters'
metadata. The joint graph can be compiled only once, so it is compiled here, around two
callables that look up the program to run at each call (`memopt.executor.runtime`).
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from memopt.errors import CaptureError, NothingToTrainError
from memopt.models.record import OutputGradients
from memopt.profiler.as_eager.corrections import corrected, deriving_as_eager, tracing_as_eager
from memopt.profiler.as_eager.layouts import computing_device
from memopt.profiler.dependencies.dependencies import Dependencies, digest
from memopt.profiler.dependencies.late import last_name
from memopt.profiler.inputs import Call, asks_for_gradients, named_tensors
from memopt.profiler.joined_collectives import buckets_of, join_collectives
from memopt.profiler.joint_graph import (
    Boxed,
    compiler,
    described,
    gradients_as_kept,
    mutations,
    partitioner,
    split_joint,
    without_zero_gradients,
)
from memopt.profiler.lean_trace import lean_trace
from memopt.profiler.model_outputs import NO_OUTPUTS, TracedOutputs, hand_out, separate_outputs
from memopt.profiler.side_effects import NO_EFFECTS, SideEffects
from memopt.profiler.taken import check_dense, check_objects_kept, check_taken
from memopt.profiler.trace import effects_of, trace_of
from memopt.profiler.uncaptured import (
    check_effects,
    check_initialised,
    why_not_derived,
)
from memopt.torch_private import aot
from memopt.torch_private.modules import buffers_of, parameters_of
from memopt.torch_private.tensors import SHARD

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Primal:
    """An input of the joint graph: where its value comes from at run time.

    Attributes:
        node: the placeholder.
        kind: "parameter", "buffer" or "input".
        name: fully qualified name of a parameter or buffer of the user's model; "" for a
            tensor that the model holds without registering it.
        index: position among the flat call arguments, for inputs.
        constant: the tensor itself, when the model does not register it.
        reader: reads that tensor where the forward does; None if the forward makes it.
        part: which part of a DTensor it is ("_local_tensor", "device_mesh"); "": it is no DTensor.
    """

    node: Node
    kind: str
    name: str
    index: int | None = None
    constant: torch.Tensor | None = None
    reader: Callable[[nn.Module], Any] | None = None
    part: str = ""

    @property
    def held(self) -> bool:
        """Whether the model holds it, and `Captured.compiled` is given its `value`: of the parts of
        a DTensor the first stands for the whole."""
        return self.kind != "input" and self.part in ("", SHARD)

    def value(self, model: nn.Module, leaves: Sequence[Any]) -> Any:
        """Its value at run time, given the model and the call's flat arguments; of a part of a
        DTensor the whole."""
        if self.index is not None:
            return leaves[self.index]
        if self.reader is not None:
            return self.reader(model)
        if self.constant is not None:
            return self.constant
        return registered(model, self.name)


@dataclass(eq=False)
class Hooks:
    """The functions that the compiled callable runs; `owner`, the executor's runtime, sets them."""

    forward: Boxed | None = None
    backward: Boxed | None = None
    owner: object = None


@dataclass(frozen=True)
class Captured:
    """A captured model: its joint graph, and the callable that AOTAutograd made around it.

    Attributes:
        module: the joint graph, functional ATen operators only.
        primals: its inputs, in order.
        tangents: placeholders of the outputs' gradients.
        forward_outputs: results of the forward part (nodes or constants); the first
            `len(mutated)` are new values of mutated inputs.
        gradients: results of the backward part, one per primal (None: no gradient).
        given: the positions of those that `compiled` takes from the backward, see `Split`.
        mutated: for each leading forward output, the index of the primal it updates.
        call: the example call that was captured.
        device: where its kernels run; None: they are not to be computed (an estimate).
        dependencies: what the trace read beside the inputs, and relied on.
        trace: names the forward's graph, as it was traced.
        compiled: `compiled(*parameters, *buffers, *args, **kwargs) -> output`; runs `hooks`.
        hooks: the forward and backward callables behind `compiled`.
        model: weak reference to the user's model.
        outputs: what is known of the leaves of the output.
        ends: what the backward half returns beside gradients (whole steps).
        effects: what the forward leaves behind; with values of the graph's among them `compiled`
            returns a pair of the model's output and these.
    """

    module: GraphModule
    primals: tuple[Primal, ...]
    tangents: tuple[Node, ...]
    forward_outputs: tuple[Any, ...]
    gradients: tuple[Any, ...]
    given: tuple[int, ...]
    mutated: tuple[int, ...]
    call: Call
    compiled: Callable[..., Any]
    hooks: Hooks
    model: weakref.ReferenceType[nn.Module]
    device: torch.device | None = None
    dependencies: Dependencies = field(default_factory=Dependencies)
    trace: str = ""
    outputs: TracedOutputs = NO_OUTPUTS
    ends: tuple[Any, ...] = ()
    effects: SideEffects = NO_EFFECTS

    @property
    def leaves(self) -> tuple[int | None, ...]:
        """For each forward output, which leaf of the model's output it is; None: none."""
        mutated = len(self.mutated)
        return tuple(
            i - mutated if mutated <= i < mutated + self.outputs.count else None
            for i in range(len(self.forward_outputs))
        )

    def sets(self, primal: Primal) -> bool:
        """Whether the forward sets a parameter or buffer to another tensor (`self.mean = ...`)."""
        return primal.held and f"model.{primal.name}" in self.effects.shown


def capture(
    model: nn.Module,
    call: Call,
    gradients: Callable[[], OutputGradients] = OutputGradients,
    to_be_run: bool = True,
) -> Captured:
    """Capture one training step of `model` for the example call.

    Args:
        model: the module, in the mode to train it in.
        call: the example call.
        gradients: what the user's loss is known to do with the leaves of the model's output. For
            those that it does not use no gradient is traced, made or charged. Asked once
            the forward is traced, so that a model that cannot be is refused first.
        to_be_run: whether what the forward leaves behind matters.

    Raises:
        CaptureError: the model cannot be captured whole (a data-dependent branch...); the message
            names the place and the remedy. NothingToTrainError: nothing in it can be trained.
    """
    check_initialised(model)
    if not asks_for_gradients(model, call):
        raise NothingToTrainError(
            "nothing to train: no parameter and no input of the model requires a gradient; "
            "call requires_grad_() on what you train before planning"
        )
    check_taken(model, call)
    device = computing_device(model, call)
    with tracing_as_eager(device), lean_trace():
        traced, dependencies = trace_of(model, call, to_be_run)
        check_dense(traced, {id(tensor): source for source, tensor in dependencies.tensors})
        check_objects_kept(model, call)
        trace, effects = digest(traced, model, dependencies), effects_of(traced)
        outputs = separate_outputs(traced, gradients())
        captured = _export(model, traced, call, dependencies, outputs)
        captured = replace(
            captured, device=device, dependencies=dependencies, trace=trace, effects=effects
        )
        check_not_set_before_read(captured)
        return captured


def check_not_set_before_read(captured: Captured) -> None:
    """Refuse a forward that sets a buffer anew and reads the one before in a checkpoint or a
    custom backward: there eager reads the new one, and a planned step the one of its forward.

    Raises:
        CaptureError: it does; the buffer is named.
    """
    late = captured.dependencies.late_names
    for primal in captured.primals:
        if not captured.sets(primal):
            continue
        again = any("ac_graph_id" in user.meta for user in primal.node.users)
        if again or late is None or last_name(primal.name) in late:
            raise CaptureError(
                f"the forward sets {primal.name} to another tensor, and what it read before is "
                "read again when the backward runs (by a checkpoint, a custom autograd function "
                "or a hook), as it is then: copy it first "
                f"(self.{last_name(primal.name)}.clone()), and hand the copy to what runs again"
            )


def _export(
    model: nn.Module, traced: Any, call: Call, dependencies: Dependencies, outputs: TracedOutputs
) -> Captured:
    hooks = Hooks()
    with contextlib.ExitStack() as stack:
        with deriving_as_eager(traced):
            joint = _joint(stack, traced, call)
        module: GraphModule = joint.graph_module
        check_effects(module)
        hand_out(module, outputs)
        corrected(module)
        without_zero_gradients(module)
        gradients_as_kept(module, call)
        names = _names(model, traced, joint)
        join_collectives(module, buckets_of(model), {n: names[n][0] for n in names})
        split = split_joint(module)
        if not split.tangents:
            raise NothingToTrainError(
                "nothing to train: no output of the model has a gradient (all are detached, "
                "integers, or computed under no_grad)"
            )
        with aot.no_donated_buffers(joint):
            compiled = aot.compile_joint(
                joint,
                partitioner(split),
                compiler(lambda: hooks.forward),
                compiler(lambda: hooks.backward),
            )
        primals = tuple(_primal(node, names, dependencies) for node in split.primals)
    _LOG.debug("captured %s: %d nodes", type(model).__name__, len(module.graph.nodes))
    return Captured(
        module=module,
        primals=primals,
        tangents=split.tangents,
        forward_outputs=split.forward_outputs,
        gradients=split.gradients,
        given=split.given,
        mutated=mutations(split),
        call=call,
        compiled=compiled,
        hooks=hooks,
        model=weakref.ref(model),
        outputs=replace(outputs, values=()),
    )


def _joint(stack: contextlib.ExitStack, traced: Any, call: Call) -> Any:
    """AOTAutograd's joint graph of dynamo's.

    Raises:
        CaptureError: it cannot be made.
    """
    try:
        return aot.export_joint(stack, traced, *call.plain)
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise CaptureError(why_not_derived(traced, call, error)) from error


def _names(model: nn.Module, traced: Any, joint: Any) -> dict[str, tuple[str, torch.Tensor]]:
    """Mangled name in the traced module → (name in the user's model or "", the tensor)."""
    known = {id(tensor): name for name, tensor in reversed(named_tensors(model))}
    tensors = {name: attrgetter(name)(traced) for name in (*joint.params_spec, *joint.buffers_spec)}
    return {name: (known.get(id(tensor), ""), tensor) for name, tensor in tensors.items()}


def registered(model: nn.Module, name: str) -> Any:
    """A parameter or buffer by its name, as it is registered: an attribute of that name may be
    something else that is made of it (a sharded parameter, gathered)."""
    path, _, last = name.rpartition(".")
    owner = attrgetter(path)(model) if path else model
    registry = parameters_of(owner) if last in parameters_of(owner) else buffers_of(owner)
    return registry[last]


def _primal(
    node: Node, names: dict[str, tuple[str, torch.Tensor]], dependencies: Dependencies
) -> Primal:
    descriptor, part = described(node)
    kind = type(descriptor).__name__
    if kind in ("ParamAOTInput", "BufferAOTInput"):
        name, tensor = names[descriptor.target]
        return Primal(
            node=node,
            kind="parameter" if kind == "ParamAOTInput" else "buffer",
            name=name,
            constant=None if name else tensor,
            reader=None if name else dependencies.reader_of(tensor),
            part=part,
        )
    if kind == "TangentAOTInput":
        raise CaptureError(
            "the model returns a DTensor; return its local tensor (to_local()), or all of it "
            "(full_tensor())"
        )
    if part:
        raise CaptureError(
            "the model is called with a DTensor; give it the local tensor (to_local()), and make a "
            "DTensor of that in the forward (DTensor.from_local)"
        )
    if kind == "PlainAOTInput":
        return Primal(node=node, kind="input", name=f"input{descriptor.idx}", index=descriptor.idx)
    if "ViewBase" in kind or "SyntheticBase" in kind:
        raise CaptureError(
            "the forward updates a buffer or input in place whose memory another buffer or input "
            f"shares ({descriptor!r}); give each its own memory (clone()) before planning"
        )
    raise CaptureError(
        f"the model takes an input memopt does not know ({descriptor!r}); "
        "pass plain tensors and Python values"
    )
