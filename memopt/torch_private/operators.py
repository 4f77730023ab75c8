"""Operators: their class, their schemas, and those whose names torch does not promise."""

from __future__ import annotations

from typing import Any

import torch

from memopt.torch_private.access import attribute, private, required
from memopt.torch_private.operator_names import COLLECTIVES, NAMED

with required("torch._ops.OpOverload"):
    from torch._ops import OpOverload as OpOverload

schema_of = attribute("torch._ops.OpOverload._schema")
"""The schema of an operator's overload."""


def _checked(namespace: Any, rows: Any) -> Any:
    for row in rows:
        private(row.name)
    return namespace


aten = _checked(torch.ops.aten, NAMED)
"""ATen's operators; checked to have those in the table."""


def collectives() -> Any:
    """Return the functional collectives; checked to have those in the table."""
    return _checked(torch.ops._c10d_functional, COLLECTIVES)


unwrapped = attribute("torch._ops.OpOverload._op")
"""The function behind an operator's overload, without the overload's own call."""
_BINDINGS = tuple(
    private(f"torch._C.{home}")
    for home in ("_VariableFunctions", "_nn", "_linalg", "_fft", "_special", "TensorBase")
)


def bindings_of(overload: Any) -> list[Any]:
    """Return torch's functions and methods in C that have an operator's name."""
    name = schema_of(overload).name.rpartition("::")[2]
    found = (getattr(home, name, None) for home in _BINDINGS)
    return [one for one in found if one is not None]


def has_kernel(overload: Any, dispatch_key: str) -> bool:
    """Whether an operator overload has a kernel of its own on a kind of device, not one composed of
    other operators."""
    find = private("torch._C._dispatch_has_kernel_for_dispatch_key")
    schema = schema_of(overload)
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    return bool(find(name, dispatch_key))
