"""Code that is not torch's where torch's own is expected: patches, and kernels registered for ATen.

Attention packages replace `F.scaled_dot_product_attention`, extensions register kernels for
operators of ATen, users try another `Tensor.sin`. A trace runs all of that, and what it gives is
then no longer a matter of the model, its inputs and torch's version alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from memopt.torch_private.access import private
from memopt.torch_private.operators import OpOverload

_NOT_RUN = (
    "torch._dynamo",
    "torch._inductor",
    "torch.ao",
    "torch.distributed",
    "torch.jit",
    "torch.nn.modules",
    "torch.onnx",
    "torch.optim",
    "torch.testing",
    "torch.utils.data",
)
"""What AOTAutograd does not run. Dynamo traces the code of `torch.nn`'s modules anew each time."""
_NOT_CALLED = frozenset({"torch.compile", "torch.load", "torch.save"})
"""What a trace does not call, and trainers replace: Lightning has a torch.compile of its own."""
_USED_BY_TORCH = ("numpy", "opt_einsum", "optree", "sympy", "torchgen", "typing_extensions")
_NAMESPACES = (
    "torch",
    "torch.nn.functional",
    "torch.functional",
    "torch.linalg",
    "torch.special",
    "torch.fft",
)
"""Whose functions are told apart one by one: one of torch's own may stand in another's place."""
_TABLES = (
    "torch._decomp.decomposition_table",
    "torch._decomp.global_decomposition_table",
    "torch._subclasses.fake_impls.op_implementations_dict",
)
"""Functions that stand in for operators of ATen while they are traced."""
_BUILT_IN = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)


@functools.cache
def _homes() -> tuple[str, ...]:
    """The folders, and files, of code that torch may call."""
    found = [f"{home}{os.sep}" for home in (Path(torch.__file__).parent, Path(__file__).parents[1])]
    for name in _USED_BY_TORCH:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            folder = str(Path(spec.origin).parent) + os.sep
            found.append(folder if spec.submodule_search_locations else spec.origin)
    return tuple(found)


def is_foreign(function: Any) -> bool:
    """Whether a function is neither torch's, nor Python's own, nor memopt's."""
    if isinstance(function, (classmethod, staticmethod)):
        return is_foreign(function.__func__)
    if isinstance(function, functools.partial):
        return is_foreign(function.func)
    if isinstance(function, types.FunctionType):
        return not _own_code(function.__code__.co_filename, function.__globals__.get("__name__"))
    if isinstance(function, _BUILT_IN):
        return not _own_module(getattr(function, "__module__", None) or "torch")
    return callable(function) and not _own_module(type(function).__module__)


@functools.cache
def _own_module(name: str) -> bool:
    top = name.partition(".")[0]
    if top in ("torch", "memopt", *_USED_BY_TORCH):
        return True
    # A module of the user's may have the name of one of Python's; a mock stands for something else.
    file = getattr(sys.modules.get(top), "__file__", None)
    pythons = top in sys.stdlib_module_names and (file is None or _of_python(file))
    return pythons and top != "unittest"


@functools.cache
def _own_code(file: str, module: str | None) -> bool:
    if file.startswith("<"):
        # Written by `dataclasses` and `namedtuple`, or a part of Python that is built in.
        frozen = file.startswith("<frozen") and _own_module(module or "")
        return frozen or not module or module.startswith(("namedtuple_", "torch"))
    return file.startswith(_homes()) or _of_python(file)


def _of_python(file: str) -> bool:
    return file.startswith(sysconfig.get_path("stdlib") + os.sep) and "site-packages" not in file


def foreign_code() -> str | None:
    """What is not torch's own in what a trace runs; None: nothing."""
    for where, function in _functions():
        if where not in _NOT_CALLED and is_foreign(function):
            return where
    return _foreign_kernel()


def _functions() -> Iterator[tuple[str, Any]]:
    """The functions of torch's modules, of their classes and of their tables; where each is."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "torch" or name.startswith(_NOT_RUN):
            continue
        for attribute, value in list(vars(module).items()):
            where = f"{name}.{attribute}"
            if isinstance(value, type):
                if value.__module__ == name:
                    yield from _members(where, vars(value))
            elif not isinstance(value, (dict, types.ModuleType)):
                yield where, value
    for table in _TABLES:
        yield from _members(table, private(table))
    for packet in list(vars(torch.ops.aten).values()):
        for overload in list(getattr(packet, "__dict__", {}).values()):
            if isinstance(overload, OpOverload):
                yield from _members(str(overload), overload.py_kernels)


def _members(where: str, found: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in list(found.items()):
        if isinstance(value, dict):
            yield from _members(where, value)
        elif getattr(key, "namespace", "aten") != "aten":
            continue
        elif isinstance(value, (types.FunctionType, functools.partial, classmethod, staticmethod)):
            yield f"{where}.{key}", value


_REGISTERED = "registered at "
_SCHEMAS = "/build/aten/src/ATen/RegisterSchema.cpp"


def _foreign_kernel() -> str | None:
    """An operator of ATen for which somebody else has registered a kernel, in Python or C++; or one
    that does not say where its kernels are from. None: there is none."""
    home = str(Path(torch.__file__).parent) + os.sep
    built: str | None = None
    dump = private("torch._C._dispatch_dump")
    for name in private("torch._C._dispatch_get_all_op_names")():
        if not name.startswith("aten::"):
            continue
        for line in dump(name).splitlines():
            _, found, place = line.partition(_REGISTERED)
            if not found or place.startswith(home):
                continue
            if built is None and _SCHEMAS in place:
                built = place.partition(_SCHEMAS)[0]
            if not built or not place.startswith(built + "/"):
                return f"{name}: {line}"
    return None


def own_functions() -> list[str]:
    """A line for each function of torch's public namespaces and each of Tensor's methods, that
    says which one it is."""
    homes: list[tuple[str, Any]] = [(name, importlib.import_module(name)) for name in _NAMESPACES]
    homes += [("Tensor", torch.Tensor), ("torch._C._nn", private("torch._C._nn"))]
    lines = []
    for home, held in homes:
        # Inherited ones, too: one that is set on Tensor and set back stays there, and is the same.
        for name, value in inspect.getmembers_static(held):
            called = f"{home}.{name}" not in _NOT_CALLED
            if called and isinstance(value, (types.FunctionType, *_BUILT_IN)):
                lines.append(f"{home}.{name} {_name(value)}")
    return lines


def _name(function: Any) -> str:
    name = getattr(function, "__qualname__", getattr(function, "__name__", ""))
    code = getattr(function, "__code__", None)
    return f"{name} {function.__module__ if code else ''} {code.co_firstlineno if code else ''}"
