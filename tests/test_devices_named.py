"""Every tensor that memopt makes has its device named: `torch.set_default_device` changes none."""

from __future__ import annotations

import ast

import pytest
from torch.utils._device import _device_constructors

from tests.layers import PACKAGE

FACTORIES = {one.__name__ for one in _device_constructors()}
USERS_OWN = {"demo.py", "commands/targets.py"}
"""They make a model's inputs, on the device that the user has chosen."""


def unnamed(source: str) -> list[int]:
    """Lines that call one of torch's factories without `device=`."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in FACTORIES
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]


@pytest.mark.parametrize("name", sorted(str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py")))
def test_factories_name_a_device(name: str) -> None:
    if name not in USERS_OWN:
        assert not unnamed((PACKAGE / name).read_text(encoding="utf-8"))


def test_a_factory_without_a_device_is_found() -> None:
    source = "torch.zeros(3)\ntorch.full((2,), 0, device=d)\ntorch.empty(1, pin_memory=True)\n"
    assert unnamed(source) == [1, 3]
