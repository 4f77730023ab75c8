"""Torch's private names are used by way of the table alone."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memopt.torch_private.rows import ROWS, TABLE
from tests.layers import PACKAGE, modules

HOME = "memopt.torch_private"
MODULES = {name: path for name, path in modules().items() if not f"{name}.".startswith(f"{HOME}.")}
DOTTED = re.compile(r"torch(\.\w+)+")
PRIVATE = re.compile(r"_[a-z]\w*", re.IGNORECASE)
NAMESPACES = {"aten": "torch.ops.aten", "collectives": "torch.ops._c10d_functional"}

ALLOWED = {
    # Traced by Dynamo, which must meet it under its own name; torch documents it.
    ("memopt.executor.self_planning", "torch._dynamo"),
    ("memopt.executor.self_planning", "torch._dynamo.graph_break"),
}
NOT_TORCHS = {
    "_fields": "of Python's named tuples",
    "_getframe": "of Python's sys",
    "_ignore_bidirectional_mask_sdpa": "of Hugging Face's masking_utils",
    "_ignore_causal_mask_sdpa": "of Hugging Face's masking_utils",
    "_output_capturing_hooks_installed": "of Hugging Face's output_capturing",
    "_requires_grad": "of Hugging Face's feature encoders",
    "_memory": "memopt's own, on a tensor that it made",
    "_load_from_state_dict": "nn.Module's, which a planned module overrides",
}
TEXTS = {
    "_backward.input": "the end of operators' names",
    "_coalesced": "the end of collectives' names",
    "_modules": "a part of Dynamo's expressions, which are read as texts",
}
PATCHES_OTHERS = {
    "memopt.capture.as_eager.corrections": "Hugging Face's masks",
    "memopt.capture.as_eager.masks": "Hugging Face's masks",
    "memopt.capture.as_eager.recorded_outputs": "Hugging Face's hooks",
}


def is_private(name: str) -> bool:
    return bool(PRIVATE.fullmatch(name))


def dotted(node: ast.expr) -> str | None:
    """`a.b.c` as a text; None: the expression is none of that kind."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return None if inner is None else f"{inner}.{node.attr}"
    return None


@functools.cache
def own_names() -> set[str]:
    """Private names that memopt defines: functions, classes, variables, attributes of its own."""
    found: set[str] = set()
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and dotted(node) in (
                f"self.{node.attr}",
                f"cls.{node.attr}",
            ):
                found.add(node.attr)
    return {name for name in found if is_private(name)}


ATTRIBUTES = {
    last
    for last in (row.rpartition(".")[2] for row in TABLE if not row.startswith("torch.ops."))
    if is_private(last)
}
"""The private attributes that the table names."""


def violations(module: str, source: str) -> Iterator[str]:
    tree = ast.parse(source)
    operators = {
        alias.asname or alias.name: NAMESPACES.get(alias.name, "")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == f"{HOME}.operators"
        for alias in node.names
    }
    for node in ast.walk(tree):
        line = f"{module} line {getattr(node, 'lineno', 0)}: "
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch.") and any(map(is_private, alias.name.split("."))):
                    yield f"{line}import {alias.name}"
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if names[0] == "torch" and any(map(is_private, names)):
                yield f"{line}from {node.module} import ..."
            if node.module == "unittest" and module not in PATCHES_OTHERS:
                yield f"{line}a patch that is not the table's"
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            text = dotted(node) or f"(...).{node.attr}"
            if operators.get(text.partition(".")[0]):
                name = f"{operators[text.partition('.')[0]]}.{node.attr}"
                if not any(f"{row}.".startswith(f"{name}.") for row in TABLE):
                    yield f"{line}{name} is no row"
            elif text.partition(".")[0] == "torch":
                if (module, text) not in ALLOWED:
                    yield f"{line}{text}"
            elif text.partition(".")[0] in ("self", "cls") or node.attr in NOT_TORCHS:
                continue
            elif node.attr not in own_names() or node.attr in ATTRIBUTES:
                yield f"{line}{text}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (line + text for text in in_text(node.value))


def in_text(text: str) -> Iterator[str]:
    """What a string constant names without a row."""
    if DOTTED.fullmatch(text):
        if any(map(is_private, text.split("."))) and text not in TABLE:
            yield f"{text!r} is no row"
        return
    packet, _, _ = text.partition(".")
    if not re.fullmatch(r"_[a-z]\w*(\.\w+)?", text) or text in TEXTS:
        return
    if hasattr(torch.ops.aten, packet) and not any(
        row.startswith(f"torch.ops.aten.{packet}.") for row in TABLE
    ):
        yield f"the operator {text!r} is no row"
    if text in ATTRIBUTES:
        yield f"{text!r} is an attribute of torch's"


@pytest.mark.parametrize("module", MODULES)
def test_no_private_name_is_used_but_by_the_table(module: str) -> None:
    assert not [*violations(module, MODULES[module].read_text(encoding="utf-8"))]


def test_what_is_allowed_is_needed() -> None:
    for module, name in ALLOWED:
        assert name in MODULES[module].read_text(encoding="utf-8")
    for module in PATCHES_OTHERS:
        assert "mock.patch.object(" in MODULES[module].read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo.config",
        "from torch._dynamo import config",
        "from torch.utils import _pytree as pytree",
        "import torch\ntorch._C._current_graph_task_id()",
        "import torch\ntorch.ops.aten._softmax(x)",
        "from memopt.torch_private.operators import aten\naten._no_such_operator.default",
        "tensor._version_counter",
        "x = getattr(tensor, '_backward_hooks')",
        "module = importlib.import_module('torch._dynamo.side_effects')",
        "private('torch._dynamo.no_such_name')",
        "from unittest import mock",
        "if name == '_convolution_double_backward':\n    pass",
    ],
)
def test_a_use_past_the_table_is_found(source: str) -> None:
    assert [*violations("memopt.profiler.x", source)]


@pytest.mark.parametrize(
    "source",
    [
        "from memopt.torch_private import pytree",
        "from memopt.torch_private.operators import aten as A\nA._softmax.out(x)",
        "private('torch.fx._lazy_graph_module._use_lazy_graph_module')",
        "self._anything.x",
        "torch.nn.Module",
        "names = ('_softmax', '_safe_softmax.default')",
    ],
)
def test_a_use_of_the_table_is_not(source: str) -> None:
    assert not [*violations("memopt.profiler.x", source)]


ASK = {
    "attribute",
    "attribute_name",
    "known",
    "optional",
    "patched",
    "private",
    "private_once",
    "replace",
    "required",
}


def asked(path: Path, scope: dict[str, Any]) -> Iterator[str]:
    """The names that a module asks the table for, where they do not depend on arguments."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ASK and node.args:
            if getattr(scope.get(node.func.id), "__module__", None) != f"{HOME}.access":
                continue
            with contextlib.suppress(NameError):
                yield eval(compile(ast.Expression(node.args[0]), str(path), "eval"), scope)


def test_what_is_asked_for_is_a_row() -> None:
    found = set()
    for name, path in modules().items():
        if "torch_private.access import" in path.read_text(encoding="utf-8"):
            found |= set(asked(path, vars(importlib.import_module(name))))
    assert len(found) > 100
    assert found <= TABLE.keys()


def test_each_row_is_used() -> None:
    """Its last part is in the code somewhere, beside the table."""
    tables = ("rows.py", "tracing_rows.py", "operator_names.py", "specimens.py")
    source = "\n".join(
        path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name not in tables
    )
    words = set(re.findall(r"\w+", source))
    operators = {row.name for row in ROWS if row.purpose.startswith("trace as one")}
    unused = [
        row.name
        for row in ROWS
        if row.name not in operators and not {*row.name.split(".")[-2:]} & words
    ]
    assert not unused
