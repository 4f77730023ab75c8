"""Defines operators and calls of memopt's own, which replace what eager runs in a traced graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memopt.torch_private.modes import TorchDispatchMode
from memopt.torch_private.operators import schema_of

OPAQUE = "memopt_opaque"
"""The namespace of operators that run a user's code, which may use autograd inside."""
RUN_ONCE: set[Any] = set()
"""Operators of users that run once in a step: memopt cannot see what they draw."""
_LIBRARIES: dict[str, Any] = {
    one: torch.library.Library(one, "FRAGMENT")  # type: ignore[no-untyped-call]
    for one in ("memopt", OPAQUE)
}


def define(
    schema: str,
    kernel: Callable[..., Any],
    described: Callable[..., Any],
    tags: tuple[torch.Tag, ...] = (),
    namespace: str = "memopt",
) -> Any:
    """Define an operator of memopt's own, once in a process for each schema.

    Args:
        schema: "name.form(arguments) -> results", or without a form.
        kernel: computes the operator; no autograd.
        described: the fake kernel: makes the results without their values.
        tags: torch's tags of the operator.
        namespace: "memopt", or OPAQUE.
    """
    name, library = schema.partition("(")[0], _LIBRARIES[namespace]
    library.define(schema, tags=tags)
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{namespace}::{name}", described, lib=library)
    packet, _, form = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), form or "default")


def runs_users_code(target: Any) -> bool:
    """Return whether a call runs code of a user's, whose costs may depend on values."""
    return target in RUN_ONCE or getattr(target, "namespace", "") == OPAQUE


def functional_name(overload: Any) -> str:
    """Return the name, and form, of the out-of-place operator for an in-place `overload`:
    "masked_fill.Scalar"."""
    schema = schema_of(overload)
    name = schema.name.removeprefix("aten::").rstrip("_")
    return f"{name}.{schema.overload_name}" if schema.overload_name else str(name)


@dataclass(frozen=True)
class Substitute:
    """Calls a function in another way, under the function's own name."""

    function: Any
    way: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function that way."""
        return self.way(self.function, *args, **kwargs)

    def __str__(self) -> str:
        return str(self.function)

    @property
    def __name__(self) -> str:
        return str(self.function.__name__)


class CallsThrough(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """A dispatch mode that calls every operator by `call(operator, args, kwargs)`."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator."""
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.call(func, args, kwargs or {})
