"""Explains why a model cannot be captured as one graph, and what to do."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.parameter import is_lazy

from memopt.capture.remedies import known_remedy, said_remedy, without_labels
from memopt.errors import CaptureError, MemoptError
from memopt.step.captured import Captured
from memopt.step.changes import REGISTRIES, Change
from memopt.step.dynamo_guards import TraceGuards
from memopt.step.input_values import READ
from memopt.step.inputs import Call
from memopt.step.nodes import module_path
from memopt.step.side_effects import why_not_set
from memopt.step.unheard import unheard
from memopt.torch_private import pytree
from memopt.torch_private.access import FILES_OF_MEMOPT, FILES_OF_TORCH
from memopt.torch_private.aot import FakeTensorMode
from memopt.torch_private.branches import LooksAnswered
from memopt.torch_private.expressions import ROOT, draws_in_numpy
from memopt.torch_private.modules import (
    OF_COMPUTED_WEIGHTS,
    BatchNorm,
    buffers_of,
    has_backward_hooks,
    hooks_on_all_backwards,
    makes_own_buffers,
)
from memopt.torch_private.numpy_numbers import taken_for_tensors
from memopt.user_code.opaque_operators import may_have_effects, name_of
from memopt.user_code.restored_state import forward_restored, state_restored

# Files of torch, memopt and Python, whose lines a user cannot change.
_NOT_USERS = (FILES_OF_TORCH, FILES_OF_MEMOPT)
_PYTHON = os.path.dirname(os.__file__)


def uninitialised(model: nn.Module) -> str | None:
    """Name a lazy module, or a fake quantizer, whose first forward makes its parameters or sizes
    its buffers; None if there is none."""
    for name, module in model.named_modules():
        held = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        lazy = any(is_lazy(tensor) for tensor in held)
        if lazy or makes_own_buffers(module):
            what = "parameters" if lazy else "ranges"
            return (
                f"{type(module).__name__} {name!r} has no {what} before the model has been "
                "called once"
            )
    return None


def check_initialised(model: nn.Module) -> None:
    """Refuse what is `uninitialised`.

    Raises:
        CaptureError: there is one, named.
    """
    if (lazy := uninitialised(model)) is not None:
        raise CaptureError(
            f"{lazy}, and planning leaves a model as it is: call the model, then plan"
        )


def why_not_captured(
    model: nn.Module, call: Call, error: Exception, inside: Sequence[str] = ()
) -> str:
    """Explain what Dynamo refused in a model's forward: in which sub-modules (the outermost first),
    at which line, and what to do about it."""
    known = (
        cumulative_average(model)
        or known_remedy(model, error)
        or _sized_by_the_first_forward(model, call, str(error))
    )
    if known is not None:
        return known
    hooked = _backward_hooks(model)
    if hooked is not None and "backwards hooks" in str(error):
        return hooked
    stack = getattr(error, "real_stack", None)
    frames = [f for f in stack or () if _is_users(f.filename)]
    where = _line_of_frame(model, frames[-1]) if frames else ""
    what = f"the model cannot be captured as one graph{where}"
    first, text = first_line(error) or type(error).__name__, str(error)
    said = said_remedy(text)
    if said is None:
        explained = re.search(r"Explanation: (.*?)(\.`? [A-Z]|\.?$)", text, re.MULTILINE)
        more = explained[1] if explained else ""
        more = more and f" ({more}{'`' * (more.count('`') % 2)})"
        said = (
            f"{first}{more}. Write that part with tensor operators, make it one operator "
            "(memopt.opaque), take it out of the forward, or plan the sub-modules around it"
        )
    elif said.startswith("memopt") and "Could not guard" not in first:
        said = f"{first}. {said}"
    return f"{what}: {said}{without_labels(model, call, inside)}"


def why_not_taken(model: nn.Module, call: Call, error: Exception) -> str:
    """Explain why an argument or a result of the model cannot be in a graph."""
    remedy = cache_remedy(model, call) if "Cache" in str(error) else None
    said = said_remedy(str(error)) if remedy is None else None
    if said is not None:
        return f"the model cannot be captured as one graph: {said}"
    remedy = remedy or (
        "memopt takes tensors, numbers, strings, None and pytrees of them: register your own class "
        "with torch.export.register_dataclass, or return a tuple or a dict"
    )
    return f"what the model takes or returns cannot be captured: {first_line(error)}. {remedy}"


def _is_users(path: str | None) -> bool:
    """Return whether a file is the user's, or an installed library's."""
    if not path or path.startswith(("<frozen ", *_NOT_USERS)):
        return False
    return "-packages" in path or not path.startswith(_PYTHON)


def first_line(error: Exception) -> str:
    """Return the first sentence of an error's message, without its full stop; "" if it has none."""
    first, *others = str(error).strip().splitlines() or [""]
    for line in others:
        if not line[:1].islower():
            break
        first = f"{first.strip()} {line}"
        if ". " in line:
            first = first.partition(". ")[0]
            break
    return first.strip().rstrip(".").rstrip()


def cumulative_average(model: nn.Module) -> str | None:
    """Explain batch norm that averages over all steps: it divides by a counter read in Python."""
    for name, module in model.named_modules():
        if isinstance(module, BatchNorm) and module.momentum is None and module.training:
            return (
                f"{type(module).__name__} {name!r} has momentum=None: its average over all steps "
                "divides by the number of steps, read in Python in every forward, which one graph "
                "cannot hold. Give it a momentum (torch's default is 0.1), or "
                "track_running_stats=False"
            )
    return None


def _sized_by_the_first_forward(model: nn.Module, call: Call, text: str) -> str | None:
    """Explain buffers that a forward gives another shape, as range observers do in their first one.
    Runs the forward only if dynamo's message names such a change, for the sake of side effects."""
    if "inplace view" not in text and "resize_" not in text:
        return None
    before = {name: buffer.shape for name, buffer in model.named_buffers()}
    if not any(b.is_floating_point() and b.numel() <= 1 for b in model.buffers()):
        return None  # a needless run could leave side effects that cannot be undone (files, queues)
    found: list[str] = []
    # Dynamo's message covers errors that the model itself raises here.
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
    """Explain full backward hooks, on one module or on all, which no graph of Dynamo's can hold."""
    hooked = [name for name, module in model.named_modules() if has_backward_hooks(module)]
    if hooks_on_all_backwards():
        found = "all modules have a full backward hook (register_module_full_backward_hook)"
    elif hooked:
        owner = f"module {hooked[0]!r}" if hooked[0] else "the model"
        found = f"{owner} has a full backward hook"
    else:
        return None
    return (
        f"{found}, which a planned step would not call: remove it before planning, or hook its "
        "parameters instead (parameter.register_hook)"
    )


def cache_remedy(model: nn.Module, call: Call) -> str | None:
    """Return the remedy for a result that is no pytree, if it is the model's cache."""
    if not getattr(getattr(model, "config", None), "use_cache", False):
        return None
    if call.kwargs.get("use_cache") is False:
        return "The model makes a key/value cache itself (prefix tuning) and returns it"
    return (
        "The model is configured to return its key/value cache, which training does not need and "
        "which would keep every layer's keys and values: set model.config.use_cache = False, or "
        "pass use_cache=False among the inputs"
    )


_SETTERS = re.compile(
    "_?set_(default_|deterministic_|float32_|fp32_|num_|flush_|warn_|autocast_|cu|mkldnn|onednn|sdp)"
    r"|(enable|allow)_\w+_sdp$"
)


def check_settings(traced: GraphModule) -> None:
    """Refuse a forward that sets how torch computes (its default dtype, deterministic algorithms).

    Raises:
        CaptureError: the forward does; the setter is named.
    """
    for node in traced.graph.nodes:
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and _SETTERS.match(name):
            setting = name.lstrip("_").removeprefix("set_")
            raise CaptureError(why_not_set(f"{setting}{line_of(node)}"))


def check_effects(module: GraphModule) -> None:
    """Refuse operators whose order is an effect (checks for errors, prints)."""
    for node in module.graph.nodes:
        if node.op == "call_function" and str(node.target) == "with_effects":
            raise CaptureError(
                f"the model uses {node.args[1]}, which checks values or prints while the step "
                "runs, and cannot be moved or run again; use operators without the check "
                "(torch.linalg.inv_ex, solve_ex, cholesky_ex instead of inv, solve, cholesky)"
            )


def check_runs_once(captured: Captured) -> None:
    """Refuse user code that runs as one operator beside a branch that goes on another way in some
    calls, which then run again without their plan.

    Raises:
        CaptureError: there are both; the message names both lines.
    """
    other = next((one for one in captured.assumed if not one.raises), None)
    nodes = captured.module.graph.nodes
    forward = (one for one in nodes if one.meta.get("partitioner_tag") != "is_backward")
    run = [one for one in forward if may_have_effects(one.target)]
    if other is None or not run:
        return
    raise CaptureError(
        f"the forward runs {name_of(run[0].target)}{line_of(run[0])} as it is, since it cannot be "
        f"traced, and has a branch that depends on a value ({other.shown}): where that goes "
        "another way than planned, the call would run again without its plan, and what this code "
        "draws or changes by itself would come twice. Write the branch with tensor operators "
        "(torch.where), or make the code an operator with a fake kernel "
        "(torch.library.custom_op, register_fake), which says that it has no effects, or plan the "
        'sub-modules (parts="auto" of memopt.wrap)'
    )


def check_numpy(traced: GraphModule) -> None:
    """Refuse numpy's random numbers, which dynamo draws and seeds in torch instead, and those of
    its numbers that dynamo takes for tensors where that gives another dtype.

    Raises:
        CaptureError: there are some; the message names the line.
    """
    graphs = [one.graph for one in traced.modules() if isinstance(one, GraphModule)]
    for node in chain.from_iterable(map(taken_for_tensors, graphs)):
        raise CaptureError(
            f"the model computes with a number of numpy's{line_of(node)}, which a trace takes for "
            "a tensor, so that the result would have another dtype: compute it with Python's math, "
            "or in __init__, as a Python number (self.scale = float(...))"
        )
    for node in chain.from_iterable(one.nodes for one in graphs):
        function = getattr(node.target, "f", None)
        if draws_in_numpy(function):
            raise CaptureError(
                f"the model cannot be captured as one graph{line_of(node)}: "
                f"{said_remedy('numpy.random')}"
            )


_OF_GRAPH = "<eval_with_key>"
"""Prefix of the file names of graphs' generated code."""


def _line_of_frame(model: nn.Module, frame: Any) -> str:
    """Return a frame's line, as `line_of` writes it; in a graph's code its node's original line."""
    if not frame.filename.startswith(_OF_GRAPH):
        return f" at {frame.filename}:{frame.lineno} ({frame.line})"
    name = str(frame.line).partition(" ")[0]
    nodes = (n for m in model.modules() if isinstance(m, GraphModule) for n in m.graph.nodes)
    return next((line_of(node) for node in nodes if node.name == name), "")


def line_of(node: Node) -> str:
    """Return a dynamo node's line in the user's code: " at file:line (text)"; or ""."""
    places = re.findall(
        r'File "([^"]+)", line (\d+).*\n\s*(.*)', node.meta.get("stack_trace") or ""
    )
    places = [p for p in places if _is_users(p[0]) and not p[0].startswith(_OF_GRAPH)]
    return " at {}:{} ({})".format(*places[-1]) if places else ""


def lasting_changes(
    model: nn.Module, call: Call, traced: GraphModule, guards: TraceGuards
) -> TraceGuards:
    """Return a trace's guards without changes that do not last: `self.buffer += 1` assigns the same
    tensor again, torch.func.functional_call replaces tensors and restores them, and each forward of
    an RNN lists weights that are computed."""
    names = {**guards.names, "model": model, "L": {"self": model}, "G": guards.scope}

    def is_kept(change: Change) -> bool:
        owner, name = change.source.replace(ROOT, "model"), change.name
        if change.kind != "attribute":
            owner, _, name = owner.rpartition(".")
        return not (name in OF_COMPUTED_WEIGHTS and isinstance(eval(owner, {}, names), nn.RNNBase))

    guards = replace(guards, changes=tuple(filter(is_kept, guards.changes)))
    registries = [one for one in guards.changes if one.source.endswith(REGISTRIES)]
    if not registries:
        return guards
    sources = list(dict.fromkeys(one.source for one in registries))
    reassigned = _reassigned(model, call, traced, names, sources)

    def lasts(change: Change) -> bool:
        name = f"{python_name(change.source).rpartition('.')[0]}.{change.name}"
        return change not in registries or name in reassigned

    return replace(guards, changes=tuple(filter(lasts, guards.changes)))


def python_name(source: str) -> str:
    """`L['self']._modules['_export_root']._modules['i']._buffers` → `model.i._buffers`."""
    return re.sub(r"\._modules\['([^']*)'\]", r".\1", source.replace(ROOT, "model"))


def names_of_modules(sources: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a model's sub-modules by Dynamo's names, the innermost of which is the
    first; ours begin with the outermost."""
    names = (module_path(source.replace(ROOT, "L['self']")) for source in reversed(sources))
    return tuple(dict.fromkeys(filter(None, names)))


def _reassigned(
    model: nn.Module,
    call: Call,
    traced: GraphModule,
    names: dict[str, Any],
    sources: Sequence[str],
) -> list[str]:
    """Return the entries of the registries that dynamo's `sources` name that one forward on fake
    tensors replaces (nothing is computed)."""
    looks = LooksAnswered(traced.meta.get(READ, ()))
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # it makes one fake of each tensor
    registries = [eval(source.replace(ROOT, "model"), {}, names) for source in sources]
    held = [buffers_of(module) for module in model.modules()]
    held += [one for source, one in zip(sources, registries, strict=True) if "._buffers" in source]
    with state_restored(model, call) as kept:
        for buffers in {id(one): one for one in held}.values():
            buffers.update(pytree.tree_map_only(Tensor, mode.from_tensor, buffers))
        given = [dict(registry) for registry in registries]
        faked = call.with_tensors(mode.from_tensor)
        try:
            # The mode writes to real tensors (parameters) where no fake one takes part.
            with kept.first_run(), mode, looks, unheard():
                model(*faked.args, **faked.kwargs)
        except MemoptError:
            raise
        except Exception as error:
            raise CaptureError(
                f"the forward assigns to {', '.join(map(python_name, sources))}, and selects by a "
                "mask, computes with numbers of tensors, or looks at values in another order "
                f"({first_line(error)}): update the tensors there in place (self.steps.add_(1), "
                "not self.steps += 1)"
            ) from error
        finally:
            # Autocast would keep casts of these fake parameters for the real ones.
            torch.clear_autocast_cache()
        return [
            f"{python_name(source).rpartition('.')[0]}.{name}"
            for source, registry, old in zip(sources, registries, given, strict=True)
            for name in {**old, **registry}
            if registry.get(name, registry) is not old.get(name, old)
        ]
