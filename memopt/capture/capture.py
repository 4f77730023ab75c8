"""Captures any nn.Module as one joint forward+backward ATen graph, wrapped once in AOTAutograd.

Nothing is computed: dynamo and AOTAutograd trace fake tensors that share the real parameters'
metadata. The joint graph can be compiled only once, so it is compiled here, around two callables
that look up the program to run at each call (`memopt.executor.runtime`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from memopt.capture.activation_numbers import numbers_as_symbols, take_tensors
from memopt.capture.as_eager.corrections import corrected, deriving_as_eager, tracing_as_eager
from memopt.capture.as_eager.layouts import computing_device
from memopt.capture.block_copies import with_all_blocks
from memopt.capture.equal_blocks import equal_blocks, without_most
from memopt.capture.lean_trace import lean_trace
from memopt.capture.taken import check_dense, check_objects_kept, check_taken
from memopt.capture.trace import effects_of, trace_of
from memopt.capture.uncaptured import check_effects, check_initialised, check_runs_once
from memopt.capture.underived import not_derived
from memopt.errors import CaptureError, NothingToTrainError
from memopt.models.record import OutputGradients
from memopt.step.assumed import assumptions_of
from memopt.step.captured import Captured, Hooks, Primal
from memopt.step.dependencies import Dependencies, digest
from memopt.step.input_values import LOOKED
from memopt.step.inputs import Call, asks_for_gradients, named_tensors
from memopt.step.joined_collectives import buckets_of, join_collectives
from memopt.step.joint_graph import (
    compiler,
    described,
    gradients_as_kept,
    mutations,
    partitioner,
    split_joint,
    without_unread_statistics,
    without_zero_gradients,
)
from memopt.step.late import last_name
from memopt.step.model_outputs import RETURNS_DTENSOR, TracedOutputs, hand_out, separate_outputs
from memopt.step.nodes import CHECKPOINTED
from memopt.step.unheard import unheard
from memopt.torch_private import aot
from memopt.user_code.told_layouts import operator_without_fake, tell_layouts

_LOG = logging.getLogger(__name__)


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
        gradients: returns what the user's loss does with the leaves of the model's output. Leaves
            that it does not use get no gradient, traced or charged. Called after the forward is
            traced, so that a model that cannot be traced is refused first.
        to_be_run: whether the forward's side effects matter.

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
    _start_engine()
    before = sys.exception()
    while True:
        try:
            return _captured(model, call, gradients, to_be_run)
        except CaptureError as error:
            name = operator_without_fake(error, before)
            if name is None or not tell_layouts(name):
                raise


@functools.cache
def _start_engine() -> None:
    """Run a first backward, where torch is built for CUDA and finds no device.

    Fake tensors make such a torch count one device. If its first backward comes after them, a
    thread is started for the device, and no forked process can run a backward any more.
    """
    if torch.version.cuda is not None and not torch.cuda.is_available():
        with torch.inference_mode(False), torch.enable_grad():
            torch.ones((), device="cpu", requires_grad=True).backward()  # type: ignore[no-untyped-call]


def _captured(
    model: nn.Module, call: Call, gradients: Callable[[], OutputGradients], to_be_run: bool
) -> Captured:
    device = computing_device(model, call)
    with tracing_as_eager(device), lean_trace():
        traced, dependencies = trace_of(model, call, to_be_run)
        check_dense(traced, {id(tensor): source for source, tensor in dependencies.tensors})
        check_objects_kept(model, call)
        trace, effects = digest(traced, model, dependencies), effects_of(traced)
        outputs = separate_outputs(traced, gradients(), call.orders)
        captured = _export(model, traced, call, dependencies, outputs)
        captured = replace(
            captured, device=device, dependencies=dependencies, trace=trace, effects=effects
        )
        check_not_set_before_read(captured)
        check_runs_once(captured)
        return captured


def check_not_set_before_read(captured: Captured) -> None:
    """Refuse a forward that replaces a buffer and reads the old one in a checkpoint or a custom
    backward: eager would read the new buffer there, a planned step the old one.

    Raises:
        CaptureError: there is such a buffer, named.
    """
    late = captured.dependencies.late_names
    for primal in captured.primals:
        if not captured.sets(primal):
            continue
        again = any(CHECKPOINTED in user.meta for user in primal.node.users)
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
            joint = _joint(stack, model, traced, call)
        module: GraphModule = joint.graph_module
        check_effects(module)
        hand_out(module, outputs)
        corrected(module)
        without_zero_gradients(module)
        without_unread_statistics(module)
        gradients_as_kept(module, call)
        names = _names(model, traced, joint)
        join_collectives(module, buckets_of(model), {n: names[n][0] for n in names})
        split = split_joint(module)
        if not split.tangents:
            raise NothingToTrainError(
                "nothing to train: no output of the model has a gradient (all are detached, "
                "integers, or computed under no_grad)"
            )
        hooks.tangents = aot.tangent_layouts(joint)
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
        assumed=assumptions_of(traced),
        looked=tuple(traced.meta.get(LOOKED, ())),
    )


def _joint(stack: contextlib.ExitStack, model: nn.Module, traced: Any, call: Call) -> Any:
    """Derive AOTAutograd's joint graph from dynamo's.

    Raises:
        CaptureError: AOTAutograd refuses the graph.
    """
    found = equal_blocks(traced)
    try:
        if found is not None:
            with without_most(traced, found), unheard():
                joint = _derived(stack, traced, call)
            if with_all_blocks(joint.graph_module, found):
                return joint
        with unheard():
            return _derived(stack, traced, call)
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise not_derived(model, traced, call, error) from error


def _derived(stack: contextlib.ExitStack, traced: Any, call: Call) -> Any:
    with numbers_as_symbols(traced, call.plain) as (args, kwargs):
        joint = aot.export_joint(stack, traced, args, kwargs)
    take_tensors(joint.graph_module)
    return joint


def _names(model: nn.Module, traced: Any, joint: Any) -> dict[str, tuple[str, torch.Tensor]]:
    """Map mangled names in the traced module → (name in the user's model or "", the tensor)."""
    known = {id(tensor): name for name, tensor in reversed(named_tensors(model))}
    tensors = {name: attrgetter(name)(traced) for name in (*joint.params_spec, *joint.buffers_spec)}
    return {name: (known.get(id(tensor), ""), tensor) for name, tensor in tensors.items()}


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
        raise CaptureError(RETURNS_DTENSOR)
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
