"""Updates in place (`masked_fill_`, `scatter_`, `cumsum_`...), traced with eager's layout.

An update in place leaves a tensor's strides as they are. AOTAutograd traces a functional form
instead, and that of some operators makes a row-major result, whatever it is given: every later
kernel would add in another order than eager's. Where that happens, the update is traced as an
operator of memopt's own, `memopt::masked_fill` and so on, which copies the tensor with its strides
and runs eager's kernel in place on the copy. The functional form stays where the user calls it:
eager's result is row-major there, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from memopt.profiler.as_eager.draws import row_major
from memopt.profiler.as_eager.operators import CallsThrough, define, functional_name
from memopt.profiler.memory_layout import same_strides
from memopt.profiler.torch_private import as_functional, is_functional, replace_functional

_in_place: dict[Any, Any] = {}
"""memopt's operator → the overload that it runs on a copy of its first argument."""


def in_place_twin(target: Any) -> Any:
    """The overload that does in place what an operator of this module does on a copy; None for
    other operators."""
    return _in_place.get(target)


@functools.cache
def written_into(overload: Any) -> Callable[..., Tensor]:
    """An operator of this module, by its overload in place, that writes to a given tensor `out`."""

    def update(given: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        overload(out.copy_(given), *args, **kwargs)
        return out

    # Generated code calls it by this name.
    name, _, form = functional_name(overload).partition(".")
    update.__name__ = f"{name}_{form or 'default'}"
    return update


def _described(given: Tensor, *_: Any, **__: Any) -> Tensor:
    """A new tensor with the given one's strides, gaps included."""
    return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)


@functools.cache
def _functional(overload: Any) -> Any:
    """memopt's operator in place of one that updates a tensor; made once in a process."""

    def kernel(given: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return written_into(overload)(given, *args, out=_described(given), **kwargs)

    _, _, arguments = str(overload._schema).replace("(a!)", "").partition("(")
    made = define(f"{functional_name(overload)}({arguments}", kernel, _described)
    _in_place[made] = overload
    return made


@functools.cache
def _updates(func: Any) -> bool:
    """Whether an operator changes its first argument's values, only these, by what it is given."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    schema = func._schema
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    return (
        schema.name.endswith("_")
        and written[:1] == [True]
        and not any(written[1:])
        and str(schema.arguments[0].type) == "Tensor"
        and torch.Tag.inplace_view not in func.tags
        and torch.Tag.nondeterministic_seeded not in func.tags
    )


class UpdatesAsEager(CallsThrough):  # type: ignore[no-untyped-call]  # torch's own
    """While a model is traced: updates in place whose functional form would change the tensor's
    strides become memopt's operators."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _updates(func) or not is_functional(args[0]) or row_major(args[0]):
            return func(*args, **kwargs)
        tensor = args[0]
        # The arguments as they are before the update: some may share the tensor's memory.
        before, kept = tree_map(_value_now, (args, kwargs))
        result = func(*args, **kwargs)
        if same_strides(tensor, tensor.from_functional().stride()):
            return result
        replace_functional(tensor, _functional(func)(*before, **kept))
        return result


def _value_now(value: Any) -> Any:
    return as_functional(value.from_functional()) if is_functional(value) else value
