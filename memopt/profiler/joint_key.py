"""The name of a joint graph: everything that AOTAutograd's trace of a dynamo graph depends on.

Two traces with one key give the same graph, in any process. What a text cannot name has no key
(`Nameless`), and is traced each time: functions that are not torch's own, sub-graphs, custom
operators, tensor subclasses, dispatch modes, hooks on saved tensors, code that stands in the place
of torch's own (`foreign_code`).
"""

from __future__ import annotations

import functools
import hashlib
import math
import platform
import types
from collections.abc import Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from memopt.profiler.backend import autocast_state, processor
from memopt.profiler.foreign_code import foreign_code, own_functions
from memopt.torch_private.access import private
from memopt.torch_private.aot import FakeTensor, functorch_settings, pickles_with_dill
from memopt.torch_private.modes import dispatch_modes, function_modes, saved_tensor_hooks
from memopt.torch_private.operators import OpOverload
from memopt.torch_private.tensors import storage_key

_NOT_READ = frozenset(
    {
        "creation_timestamp",
        "example_value",
        "from_node",
        "nn_module_stack",
        "seq_nr",
        "source_fn_stack",
        "stack_trace",
        "tensor_dict",
        "val",
    }
)
"""What dynamo says of a node and the trace does not read; of the stacks see `stacks_of`."""
_INPUTS = frozenset({"BufferAOTInput", "ParamAOTInput", "PlainAOTInput", "TangentAOTInput"})
"""AOTAutograd's inputs that are one plain tensor each."""
_PLAIN = (nn.Parameter, nn.Buffer, torch.Tensor, FakeTensor)
_ATOMS = (bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Nameless(Exception):
    """A trace depends on something that has no name in another process."""


def traced_plainly() -> bool:
    """Whether nothing of the user's would look on, or interfere, while a model is traced here."""
    return (
        not dispatch_modes()
        and not function_modes()
        and saved_tensor_hooks() is None
        and not torch.is_inference_mode_enabled()
        and not torch.is_anomaly_enabled()
    )


def joint_key(
    traced: GraphModule, args: Iterable[Any], descriptors: Iterable[Any], device: torch.device
) -> str:
    """The key of the joint graph that AOTAutograd makes.

    Args:
        traced: dynamo's graph.
        args: what the joint graph is traced with: fake inputs, and gradients of outputs.
        descriptors: AOTAutograd's, of each.
        device: where its kernels run.

    Raises:
        Nameless: there is none.
    """
    lines = [_environment(device), *_state(), *_inputs(args, descriptors), *_graph(traced)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def stacks_of(node: Node) -> tuple[str | None, str | None]:
    """The modules and the source lines that a node comes from, as texts; None: it does not say."""
    stack = node.meta.get("nn_module_stack")
    modules = None
    if stack is not None:
        modules = "|".join(f"{key} {path} {kind}" for key, (path, kind) in stack.items())
    return modules, node.meta.get("stack_trace")


@functools.cache
def _environment(device: torch.device) -> str:
    """What stays as it is while a process runs."""
    home = Path(__file__).parent.parent
    source = hashlib.sha256()
    for path in sorted(home.rglob("*.py")):
        source.update(f"{path.relative_to(home)}\n".encode() + path.read_bytes())
    parts: list[object] = [
        source.hexdigest(),
        torch.__version__,
        torch.version.git_version,
        torch.version.cuda,
        platform.python_version(),
        device,
        processor(),
        # What writes a graph must be there to read it.
        pickles_with_dill(),
    ]
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_properties(device))
    else:
        parts.append(torch.backends.cpu.get_cpu_capability())
    return repr([str(part) for part in parts])


_SETTINGS = {
    "cuda": (
        "cudnn_sdp_enabled",
        "flash_sdp_enabled",
        "math_sdp_enabled",
        "mem_efficient_sdp_enabled",
    ),
    "cudnn": (
        "version",
        "enabled",
        "deterministic",
        "benchmark",
        "benchmark_limit",
        "allow_tf32",
        "fp32_precision",
    ),
    "cuda.matmul": (
        "allow_tf32",
        "allow_fp16_accumulation",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "fp32_precision",
    ),
    "mkldnn": ("enabled", "deterministic", "allow_tf32", "fp32_precision"),
    "opt_einsum": ("enabled", "strategy"),
}
"""What can be set of `torch.backends`, and kernels or the choice of them depend on."""


def _state() -> list[str]:
    """Everything that can be set in torch and that a trace depends on."""
    foreign = foreign_code()
    if foreign is not None:
        raise Nameless(f"code that is not torch's: {foreign}")
    priority = private("torch._C._get_sdp_priority_order")
    said = {
        "functions": hashlib.sha256("\n".join(own_functions()).encode()).hexdigest(),
        "functorch": functorch_settings(),
        "shapes": private("torch.fx.experimental._config").save_config_portable(),
        "autocast": (autocast_state(), torch.is_autocast_cache_enabled()),
        "dtype": torch.get_default_dtype(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "attention": priority(),
        **{name: _settings(name, settings) for name, settings in _SETTINGS.items()},
    }
    return [f"{name}: {value!r}" for name, value in said.items()]


def _settings(home: str, names: Iterable[str]) -> list[object]:
    found: list[object] = []
    for name in names:
        try:
            value = attrgetter(f"{home}.{name}")(torch.backends)
            found.append(value() if callable(value) else value)
        except (AttributeError, RuntimeError) as error:
            # This torch does not have it, or two settings contradict each other.
            found.append(type(error).__name__)
    return found


def _inputs(args: Iterable[Any], descriptors: Iterable[Any]) -> list[str]:
    """A line for each input of the joint graph; inputs in one memory have its number."""
    memories: dict[int, int] = {}
    lines = []
    for value, descriptor in zip(args, descriptors, strict=True):
        if type(descriptor).__name__ not in _INPUTS:
            raise Nameless(f"an input that is {descriptor!r}")
        if type(value) is not FakeTensor or value.constant is not None:
            raise Nameless(f"an input that is a {type(value).__name__}")
        memory = storage_key(value.untyped_storage())
        place = memories.setdefault(memory, len(memories))
        lines.append(f"{descriptor!r} {place} {tensor_text(value)}")
    return lines


def tensor_text(value: torch.Tensor) -> str:
    """All that a trace sees of a tensor."""
    if type(value) not in _PLAIN:
        raise Nameless(f"a {type(value).__name__}")
    if value.layout is not torch.strided or value.is_quantized:
        raise Nameless(f"a tensor laid out as {value.layout}")
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    if not all(type(number) is int for number in numbers):
        raise Nameless("a shape that is not known")
    said = (
        tuple(value.shape),
        value.stride(),
        value.storage_offset(),
        value.untyped_storage().nbytes(),
        value.dtype,
        value.device,
        value.requires_grad,
        value.is_leaf,
        value.is_conj(),
        value.is_neg(),
        value.is_inference(),
    )
    return repr(said)


def _graph(traced: GraphModule) -> list[str]:
    """A line for each node of dynamo's graph, and for each tensor that it holds."""
    lines = [
        f"{name} {type(tensor).__name__} {tensor_text(tensor)}"
        for name, tensor in (*traced.named_parameters(), *traced.named_buffers())
    ]
    order: dict[Node, int] = {}
    modules: dict[str | None, int] = {}
    sources: dict[str | None, int] = {}
    for place, node in enumerate(traced.graph.nodes):
        unknown = node.meta.keys() - _NOT_READ
        if unknown:
            raise Nameless(f"a node with {', '.join(sorted(unknown))}")
        given = f"{_text(node.args, order)} {_text(node.kwargs, order)}"
        target = _target(traced, node)
        module, source = stacks_of(node)
        stacks = f"{modules.setdefault(module, place)} {sources.setdefault(source, place)}"
        lines.append(f"{node.op} {target} {given} {stacks}")
        order[node] = place
    return lines


def _target(traced: GraphModule, node: Node) -> str:
    match node.op:
        case "placeholder" | "output":
            return str(node.target)
        case "get_attr":
            held: Any = traced
            for name in str(node.target).split("."):
                held = getattr(held, name)
            if not isinstance(held, torch.Tensor):
                raise Nameless(f"a {type(held).__name__} in the graph")
            return str(node.target)
        case "call_method":
            return _method(str(node.target))
        case "call_function" if node.target is getattr:
            return f"getattr {_method(str(node.args[1]))}"
        case "call_function":
            return function_name(node.target)
    raise Nameless(f"a {node.op}")


def _method(name: str) -> str:
    # Whose it is `_state` has asked.
    if not hasattr(torch.Tensor, name):
        raise Nameless(f"the method {name}")
    return name


def function_name(function: Any) -> str:
    """The name under which torch has one of its own functions.

    Raises:
        Nameless: it is not torch's, or not found by its name.
    """
    if isinstance(function, OpOverload):
        if function.namespace != "aten":
            raise Nameless(f"the operator {function}")
        return str(function)
    if not isinstance(function, (types.FunctionType, types.BuiltinFunctionType)):
        raise Nameless(f"the function {function!r}")
    name: str = private("torch.fx.node._get_qualified_name")(function)
    root, *rest = name.split(".")
    found: Any = {"torch": torch, "_operator": __import__("operator")}.get(root)
    for part in rest:
        found = getattr(found, part, None)
    if found is not function:
        raise Nameless(f"the function {name}")
    return name


def _text(value: Any, order: Mapping[Node, int]) -> str:
    """An argument of a node, as a text that is equal only where arguments are."""
    if isinstance(value, Node):
        return f"%{order[value]}"
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        inside = ", ".join(_text(one, order) for one in value)
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    if isinstance(value, dict):
        inside = ", ".join(f"{key!r}: {_text(one, order)}" for key, one in value.items())
        return f"{{{inside}}}"
    if isinstance(value, slice):
        return f"slice{_text((value.start, value.stop, value.step), order)}"
    if type(value) in (float, complex):
        return _number(value)
    if type(value) in _ATOMS or value is Ellipsis:
        return f"{type(value).__name__} {value!r}"
    raise Nameless(f"a {type(value).__name__} as argument")


def _number(value: complex) -> str:
    """A number with its sign of zero; one that is none is told apart by nothing else."""
    if isinstance(value, complex):
        return f"complex {_number(value.real)} {_number(value.imag)}"
    return f"float {'nan' if math.isnan(value) else value.hex()}"
