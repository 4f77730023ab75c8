"""Capture: one joint forward+backward ATen graph of any nn.Module, wrapped once in AOTAutograd.

Nothing is computed: dynamo and AOTAutograd trace fake tensors that share the real parameters'
metadata. The joint graph can be compiled only once, so it is compiled here, around two
callables that look up the program to run at each call (`memopt.executor.runtime`).
"""

from __future__ import annotations

import contextlib
import logging
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from memopt.errors import CaptureError
from memopt.models.record import OutputGradients
from memopt.profiler import torch_private
from memopt.profiler.eager_dropout import dropout_as_eager
from memopt.profiler.fake_results import correct_fake_results
from memopt.profiler.hugging_face import as_eager, cache_remedy
from memopt.profiler.inputs import Call
from memopt.profiler.output_views import NO_OUTPUTS, OutputForms, hand_out, trace_apart
from memopt.profiler.side_effects import check_side_effects
from memopt.profiler.uncaptured import why_not_captured

_LOG = logging.getLogger(__name__)

Boxed = Callable[[list[Any]], Any]


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
    """

    node: Node
    kind: str
    name: str
    index: int | None = None
    constant: torch.Tensor | None = None

    def value(self, model: nn.Module, leaves: Sequence[Any]) -> Any:
        """What it is at run time, given the model and the call's flat arguments."""
        if self.index is not None:
            return leaves[self.index]
        if self.constant is not None:
            return self.constant
        path, _, name = self.name.rpartition(".")
        return getattr(model.get_submodule(path), name)


@dataclass(eq=False)
class Hooks:
    """What the compiled callable runs; set by the executor's runtime, which `owner` is."""

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
        mutated: for each leading forward output, the index of the primal it updates.
        call: the example call that was captured.
        compiled: `compiled(*parameters, *buffers, *args, **kwargs) -> output`; runs `hooks`.
        hooks: the forward and backward callables behind `compiled`.
        model: weak reference to the user's model.
        forms: what is known of the leaves of the output.
    """

    module: GraphModule
    primals: tuple[Primal, ...]
    tangents: tuple[Node, ...]
    forward_outputs: tuple[Any, ...]
    gradients: tuple[Any, ...]
    mutated: tuple[int, ...]
    call: Call
    compiled: Callable[..., Any]
    hooks: Hooks
    model: weakref.ReferenceType[nn.Module]
    forms: OutputForms = NO_OUTPUTS

    @property
    def leaves(self) -> tuple[int | None, ...]:
        """For each forward output, which leaf of the model's output it is; None: none."""
        mutated = len(self.mutated)
        return tuple(
            i - mutated if mutated <= i < mutated + self.forms.count else None
            for i in range(len(self.forward_outputs))
        )


def capture(
    model: nn.Module, call: Call, gradients: Callable[[], OutputGradients] = OutputGradients
) -> Captured:
    """Capture one training step of `model` for the example call.

    Args:
        model: the module, in the mode to train it in.
        call: the example call.
        gradients: what the user's loss is known to do with the leaves of the model's output. For
            those that it does not use no gradient is traced, made or charged. Asked once
            the forward is traced, so that a model that cannot be is refused first.

    Raises:
        CaptureError: the model cannot be captured whole (a data-dependent branch...),
            or nothing in it can be trained; the message names the place and the remedy.
    """
    if not any(p.requires_grad for p in model.parameters()) and not any(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in call.leaves
    ):
        raise CaptureError(
            "nothing to train: no parameter and no input of the model requires a gradient; "
            "call requires_grad_() on what you train before planning"
        )
    for leaf in call.leaves:
        if not isinstance(leaf, (torch.Tensor, str, int, float, bool, type(None))):
            raise CaptureError(
                f"the model is called with a {type(leaf).__name__}; memopt takes tensors, numbers, "
                "strings, None and pytrees of them; keep other objects as attributes of the model"
            )
    with torch.enable_grad():
        traced = _trace(model, call)
        return _export(model, traced, call, trace_apart(traced, gradients()))


def _trace(model: nn.Module, call: Call) -> Any:
    from torch._dynamo.exc import TorchDynamoException

    try:
        module, changed = as_eager(
            lambda: torch_private.dynamo_capture(model, call.args, call.kwargs)
        )
    except TorchDynamoException as error:
        raise CaptureError(why_not_captured(model, error)) from error
    except AssertionError as error:
        raise CaptureError(
            f"what the model takes or returns cannot be captured: {str(error).strip()}. "
            + (cache_remedy(model) or _PYTREES)
        ) from error
    check_side_effects(model, call, changed)
    return module


_PYTREES = (
    "memopt takes tensors, numbers, strings, None and pytrees of them: register your own class "
    "with torch.export.register_dataclass, or return a tuple or a dict"
)


def _export(model: nn.Module, traced: Any, call: Call, forms: OutputForms) -> Captured:
    hooks = Hooks()
    with contextlib.ExitStack() as stack:
        try:
            joint = torch_private.export_joint(stack, traced, call.args, call.kwargs)
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            where = _shape_from_data(traced)
            if where is not None:
                raise CaptureError(
                    f"a shape depends on the values of a tensor{where}: {first}. memopt needs the "
                    "same shapes in every step: multiply by a mask or use torch.where instead of "
                    "selecting by a condition (y[mask], nonzero, unique)"
                ) from error
            raise CaptureError(
                f"the model's backward cannot be traced: {first}. Look for operators without a "
                "derivative, in-place updates of leaf parameters, or double backward in the forward"
            ) from error
        module: GraphModule = joint.graph_module
        _check_effects(module)
        hand_out(module, forms)
        correct_fake_results(module)
        dropout_as_eager(module)
        split = _split(module)
        if not split.tangents:
            raise CaptureError(
                "nothing to train: no output of the model has a gradient (all are detached, "
                "integers, or computed under no_grad)"
            )
        names = _names(model, traced, joint)
        with torch_private.no_donated_buffers(joint):
            compiled = torch_private.compile_joint(
                joint,
                _partitioner(split),
                _compiler(lambda: hooks.forward),
                _compiler(lambda: hooks.backward),
            )
        primals = tuple(_primal(node, names, model) for node in split.primals)
    _LOG.debug("captured %s: %d nodes", type(model).__name__, len(module.graph.nodes))
    return Captured(
        module=module,
        primals=primals,
        tangents=split.tangents,
        forward_outputs=split.forward_outputs,
        gradients=split.gradients,
        mutated=_mutations(split),
        call=call,
        compiled=compiled,
        hooks=hooks,
        model=weakref.ref(model),
        forms=replace(forms, values=()),
    )


def _check_effects(module: GraphModule) -> None:
    """Refuse operators whose order among themselves is an effect (checks for errors, prints)."""
    for node in module.graph.nodes:
        if node.op == "call_function" and str(node.target) == "with_effects":
            raise CaptureError(
                f"the model uses {node.args[1]}, which checks values or prints while the step "
                "runs, and cannot be moved or run again; use operators without the check "
                "(torch.linalg.inv_ex, solve_ex, cholesky_ex instead of inv, solve, cholesky)"
            )


def _shape_from_data(traced: GraphModule) -> str | None:
    """The line that makes a tensor whose shape dynamo left open; None if there is none."""
    for node in traced.graph.nodes:
        value = node.meta.get("example_value", node.meta.get("val"))
        if isinstance(value, torch.Tensor) and any(
            isinstance(size, torch.SymInt) for size in value.shape
        ):
            places = re.findall(
                r'File "([^"]+)", line (\d+).*\n\s*(.*)', node.meta.get("stack_trace") or ""
            )
            return " at {}:{} ({})".format(*places[-1]) if places else ""
    return None


@dataclass(frozen=True)
class _Split:
    primals: tuple[Node, ...]
    tangents: tuple[Node, ...]
    forward_outputs: tuple[Any, ...]
    gradients: tuple[Any, ...]
    descriptors: tuple[Any, ...]
    output: Node


def _split(module: GraphModule) -> _Split:
    descriptors = torch_private.descriptor_types()
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    tangents = tuple(
        n for n in placeholders if isinstance(n.meta.get("desc"), descriptors.TangentAOTInput)
    )
    primals = tuple(n for n in placeholders if n not in tangents)
    output = next(n for n in reversed(module.graph.nodes) if n.op == "output")
    results = pytree.tree_leaves(output.args[0], is_leaf=lambda x: x is None)
    count = len(results) - len(primals)
    return _Split(
        primals=primals,
        tangents=tangents,
        forward_outputs=tuple(results[:count]),
        gradients=tuple(results[count:]),
        descriptors=tuple(output.meta["desc"])[:count],
        output=output,
    )


def _mutations(split: _Split) -> tuple[int, ...]:
    by_descriptor = {repr(n.meta["desc"]): i for i, n in enumerate(split.primals)}
    mutated = []
    for descriptor in split.descriptors:
        if type(descriptor).__name__ != "InputMutationAOTOutput":
            break
        mutated.append(by_descriptor[repr(descriptor.mutated_input)])
    return tuple(mutated)


def _names(model: nn.Module, traced: Any, joint: Any) -> dict[str, tuple[str, torch.Tensor]]:
    """Mangled name in the traced module → (name in the user's model or "", the tensor)."""
    known: dict[int, str] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        known.setdefault(id(tensor), name)
    names = {}
    for mangled in (*joint.params_spec, *joint.buffers_spec):
        tensor = traced
        for part in mangled.split("."):
            tensor = getattr(tensor, part)
        names[mangled] = (known.get(id(tensor), ""), tensor)
    return names


def _primal(node: Node, names: dict[str, tuple[str, torch.Tensor]], model: nn.Module) -> Primal:
    descriptor = node.meta["desc"]
    kind = type(descriptor).__name__
    if kind in ("ParamAOTInput", "BufferAOTInput"):
        name, tensor = names[descriptor.target]
        return Primal(
            node=node,
            kind="parameter" if kind == "ParamAOTInput" else "buffer",
            name=name,
            constant=None if name else tensor,
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


def _compiler(find: Callable[[], Boxed | None]) -> Callable[..., Boxed]:
    def compile_(graph_module: GraphModule, inputs: Any) -> Boxed:
        def run(args: list[Any]) -> Any:
            target = find()
            if target is None:
                raise RuntimeError("memopt: no program is installed in this captured model")
            return target(args)

        run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's own marker
        return run

    return compile_


def _partitioner(split: _Split) -> Callable[..., tuple[GraphModule, GraphModule]]:
    """A partition whose only saved value is a 0-d token; the real work runs in `hooks`."""

    def stand_in(graph: FxGraph, node: Node) -> Node:
        empty = graph.call_function(torch.ops.aten.empty.memory_format, ([],))
        empty.meta = dict(node.meta)
        return empty

    def partition(
        joint: GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[GraphModule, GraphModule]:
        if num_fwd_outputs != len(split.forward_outputs):
            raise CaptureError(
                f"AOTAutograd counts {num_fwd_outputs} forward outputs, memopt "
                f"{len(split.forward_outputs)}; please report this model"
            )
        values: list[Any] = [n.meta.get("val") for n in split.primals]
        fake_mode = next(v.fake_mode for v in values if isinstance(v, FakeTensor))
        forward = FxGraph()
        copies = {n: forward.node_copy(n) for n in split.primals}
        outputs = [
            (copies[o] if o in copies else stand_in(forward, o)) if isinstance(o, Node) else o
            for o in split.forward_outputs
        ]
        token = forward.call_function(torch.ops.aten.empty.memory_format, ([],))
        with fake_mode:
            token.meta["val"] = torch.empty((), dtype=torch.int64, device="cpu")
        result = forward.output((*outputs, token))
        result.meta = dict(split.output.meta)
        result.meta["desc"] = [*split.descriptors, None]

        backward = FxGraph()
        backward.placeholder("token").meta["val"] = token.meta["val"]
        tangents = {n: backward.node_copy(n) for n in split.tangents}
        gradients = [
            (tangents[g] if g in tangents else stand_in(backward, g)) if isinstance(g, Node) else g
            for g in split.gradients
        ]
        result = backward.output(tuple(gradients))
        result.meta = dict(split.output.meta)
        result.meta["desc"] = list(split.output.meta["desc"])[num_fwd_outputs:]
        return GraphModule(joint, forward), GraphModule(joint, backward)

    return partition
