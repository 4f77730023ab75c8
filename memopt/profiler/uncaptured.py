"""Why a model cannot be captured as one graph, in words that say what to do."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from memopt.errors import CaptureError
from memopt.profiler.dependencies.dynamo_guards import ROOT
from memopt.profiler.inputs import Call
from memopt.profiler.remedies import known_remedy, without_labels
from memopt.profiler.restored_state import forward_restored, state_restored


def check_initialised(model: nn.Module) -> None:
    """Refuse lazy modules, whose first forward makes their parameters.

    Raises:
        CaptureError: there is one, named.
    """
    for name, module in model.named_modules():
        held = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(is_lazy(tensor) for tensor in held):
            raise CaptureError(
                f"{type(module).__name__} {name!r} has no parameters before the model has been "
                "called once, and planning leaves a model as it is: call the model, then plan"
            )


def why_not_captured(model: nn.Module, call: Call, error: Exception) -> str:
    """The message on what dynamo refused in a model's forward, where, and what to do about it."""
    known = (
        _cumulative_average(model)
        or known_remedy(model, error)
        or _sized_by_the_first_forward(model, call)
    )
    if known is not None:
        return known
    hooked = _backward_hooks(model)
    if hooked is not None and "backwards hooks" in str(error):
        return hooked
    stack = getattr(error, "real_stack", None)
    home = os.path.dirname(torch.__file__)
    frames = [f for f in stack or () if f.filename and not f.filename.startswith(home)]
    where = f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
    first = first_line(error) or type(error).__name__
    return (
        f"the model cannot be captured as one graph{where}: {first}. memopt needs a forward "
        "without data-dependent Python control flow (.item(), tensor truth values); rewrite that "
        "part with tensor operators (torch.where) or plan the sub-modules around it"
        + without_labels(call)
    )


def why_not_taken(model: nn.Module, error: Exception) -> str:
    """The message on an argument or a result of the model that no graph can have."""
    remedy = cache_remedy(model) or (
        "memopt takes tensors, numbers, strings, None and pytrees of them: register your own class "
        "with torch.export.register_dataclass, or return a tuple or a dict"
    )
    return f"what the model takes or returns cannot be captured: {str(error).strip()}. {remedy}"


def first_line(error: Exception) -> str:
    """The first line of what an error says; "" if it says nothing."""
    return next(iter(str(error).strip().splitlines()), "")


def _cumulative_average(model: nn.Module) -> str | None:
    """Batch norm that averages over all steps, which divides by a step counter read in Python."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.momentum is None and module.training:
            return (
                f"{type(module).__name__} {name!r} has momentum=None: its average over all steps "
                "divides by the number of steps, read in Python in every forward, which one graph "
                "cannot hold. Give it a momentum (torch's default is 0.1), or "
                "track_running_stats=False"
            )
    return None


def _sized_by_the_first_forward(model: nn.Module, call: Call) -> str | None:
    """Buffers that a forward gives another shape, as observers of ranges do in their first one."""
    before = {name: buffer.shape for name, buffer in model.named_buffers()}
    found: list[str] = []
    # What the model itself raises here, dynamo has said already.
    with contextlib.suppress(Exception), forward_restored(model, call):
        now = dict(model.named_buffers())
        found = [n for n, shape in before.items() if n in now and now[n].shape != shape]
    if not found:
        return None
    return (
        f"the forward gives the buffer {found[0]!r} its size, and planning leaves a model as it "
        "is: call the model once before it is planned or wrapped (a buffer that changes in size in "
        "later forwards, too, no plan can hold: give it the largest size where it is registered)"
    )


def _backward_hooks(model: nn.Module) -> str | None:
    """A module's full backward hooks, which dynamo puts into no graph."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            owner = f"module {name!r}" if name else "the model"
            return (
                f"{owner} has a full backward hook, which a planned step would not call: remove it "
                "before planning, or hook its parameters instead (parameter.register_hook)"
            )
    return None


def cache_remedy(model: nn.Module) -> str | None:
    """The remedy for a result that is no pytree, where it is the model's cache."""
    if not getattr(getattr(model, "config", None), "use_cache", False):
        return None
    return (
        "The model is configured to return its key/value cache, which training does not need and "
        "which would keep every layer's keys and values: set model.config.use_cache = False, or "
        "pass use_cache=False among the inputs"
    )


def check_effects(module: GraphModule) -> None:
    """Refuse operators whose order among themselves is an effect (checks for errors, prints)."""
    for node in module.graph.nodes:
        if node.op == "call_function" and str(node.target) == "with_effects":
            raise CaptureError(
                f"the model uses {node.args[1]}, which checks values or prints while the step "
                "runs, and cannot be moved or run again; use operators without the check "
                "(torch.linalg.inv_ex, solve_ex, cholesky_ex instead of inv, solve, cholesky)"
            )


def shape_from_data(traced: GraphModule) -> str | None:
    """The line that makes a tensor whose shape dynamo left open; None if there is none."""
    for node in traced.graph.nodes:
        value = _example(node)
        if isinstance(value, torch.Tensor) and any(
            isinstance(size, torch.SymInt) for size in value.shape
        ):
            return _line_of(node)
    return None


def value_read(traced: GraphModule) -> str | None:
    """The line that reads a number out of a tensor; None if there is none."""
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool)
    found = (n for n in traced.graph.nodes if isinstance(_example(n), numbers))
    return next(map(_line_of, found), None)


def _example(node: Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _line_of(node: Node) -> str:
    places = re.findall(
        r'File "([^"]+)", line (\d+).*\n\s*(.*)', node.meta.get("stack_trace") or ""
    )
    return " at {}:{} ({})".format(*places[-1]) if places else ""


def side_effects(model: nn.Module, call: Call, changed: Iterable[str]) -> list[str]:
    """Names of the model's and its inputs' objects that a planned step would not leave behind as
    the forward does: it sets their attributes, or assigns a buffer anew.

    Args:
        model: the user's model.
        call: the captured call.
        changed: dynamo's names of the objects that the forward changes.
    """
    # Globals are left out: libraries set and reset context variables there.
    names = [_python_name(source) for source in changed if source.startswith("L[")]
    if names and all(name.endswith("._buffers") for name in names):
        # `self.buffer += 1` assigns the same tensor again: only the update counts.
        names = _assigned_buffers(model, call)
    return names


def why_side_effects(names: Iterable[str]) -> str:
    """The message on what the forward changes, as `side_effects` names it."""
    return (
        f"the forward changes Python state of {', '.join(names)}, which a planned step would leave "
        "as it is. Return such values as outputs; update buffers in place (self.buffer.copy_(...)) "
        "instead of assigning them; if this is a cache that the first call builds, call the model "
        "once before planning"
    )


def _python_name(source: str) -> str:
    """`L['self']._modules['_export_root']._modules['i']._buffers` → `model.i._buffers`."""
    path = source.replace(ROOT, "model")
    path = re.sub(r"\._modules\['([^']*)'\]", r".\1", path)
    return re.sub(r"^L\['flat_args'\]", "inputs", path)


def _assigned_buffers(model: nn.Module, call: Call) -> list[str]:
    """Buffers that hold another tensor after one forward on fake tensors (nothing is computed)."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # it makes one fake of each tensor
    modules = [(name, module._buffers) for name, module in model.named_modules()]
    with state_restored(model, call):
        for _, buffers in modules:
            buffers.update(pytree.tree_map_only(Tensor, mode.from_tensor, buffers))
        given = [dict(buffers) for _, buffers in modules]
        faked = call.with_tensors(mode.from_tensor)
        try:
            with mode:
                model(*faked.args, **faked.kwargs)
        finally:
            # Autocast keeps casts of parameters; these are fake, the parameters are not.
            torch.clear_autocast_cache()
        return [
            ".".join(filter(None, ("model", path, name)))
            for (path, buffers), old in zip(modules, given, strict=True)
            for name in buffers
            if buffers[name] is not old.get(name)
        ]
