"""The list of slow tests: every line of it names a test that is there."""

from __future__ import annotations

import ast

import pytest

from tests.conftest import SLOW
from tests.layers import ROOT

FILES = sorted({line.partition("::")[0] for line in SLOW if line})


@pytest.mark.parametrize("path", FILES)
def test_names_tests_that_are_there(path: str) -> None:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    listed = {line.split("::")[-1].partition("[")[0] for line in SLOW if line.startswith(path)}
    assert listed <= functions
