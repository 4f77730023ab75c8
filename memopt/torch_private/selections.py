"""Selections by tensors' values (`x[mask]`, `nonzero()`, `unique()`) in a trace: Dynamo makes
symbols of their sizes. Where these are known, operators of fixed sizes take their place, which
compute the same, and numbers where a size alone is read. So do tensors in the place of comparisons
whose result is Python's (`torch.equal`)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from memopt.torch_private.dynamo import constant, handlers, variables

Count = Callable[[Any, Any, str], int | None]
"""(translator, variable of a tensor, method) → the number that the method computes; None: it is not
known."""
_COMPARED = {"allclose": "isclose", "equal": "eq"}
_UNIQUE = {
    "unique": ("sorted", "return_inverse", "return_counts", "dim"),
    "unique_consecutive": ("return_inverse", "return_counts", "dim"),
}
"""Functions that leave out what is there before → their arguments."""
_METHODS = (
    *(*_COMPARED, *_UNIQUE),
    *("argwhere", "bincount", "masked_select", "nonzero", "repeat_interleave"),
)
_COUNTED = (*_UNIQUE, "argwhere", "nonzero", "where")
_WHERE = torch.where
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


class Selections:
    """Replaces selections of known sizes.

    Args:
        count: tells sizes.
        is_ours: (translator, variable) → whether it is a tensor whose size `count` may know.
        assume: takes the value of a tensor for true: calls where it is not run unplanned.
    """

    def __init__(
        self,
        count: Count,
        is_ours: Callable[[Any, Any], bool],
        assume: Callable[[Any, Any], object],
    ) -> None:
        self._count, self._is_ours, self._assume = count, is_ours, assume
        self.open = dict[str, str]()
        """Names of nodes that count, where that is not known → what is selected from."""
        self._tuple, self._function = variables("TupleVariable", "UserFunctionVariable")

    def functions(self) -> dict[Any, Callable[..., Any]]:
        """Return Dynamo's handlers of the functions."""
        named = {getattr(torch, name): name for name in _METHODS} | {_WHERE: "where"}
        known = handlers()

        def handler(usual: Callable[..., Any] | None, name: str) -> Callable[..., Any]:
            def handled(own: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
                first, *more = [one.realize() for one in args] or [None]
                found = self.method(translator, first, name, more, kwargs)
                if found is None and usual is not None:
                    return usual(own, translator, *args, **kwargs)
                return found

            return handled

        return {function: handler(known.get(function), name) for function, name in named.items()}

    def method(
        self, translator: Any, variable: Any, name: str, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Return what a method of a tensor selects; None: it is no such, or its size not known."""
        if not self._is_ours(translator, variable):
            return None
        given = [one.realize() for one in args]
        if name == "repeat_interleave" and "output_size" not in kwargs:
            return self._repeated(translator, variable, given, kwargs)
        if name == "masked_select" and len(given) == 1 and not kwargs:
            return self._masked(translator, variable, given[0])
        if name in _UNIQUE:
            return self._unique(translator, variable, name, given, kwargs)
        if name == "bincount":
            return self._bins(translator, variable, given, kwargs)
        if name in _COMPARED and given:
            return self._compared(translator, variable, name, given, kwargs)
        if name == "__setitem__":
            return self._set(translator, variable, *given)
        if given or name not in ("argwhere", "nonzero", "where"):
            return None
        as_tuple = "as_tuple" in kwargs and kwargs["as_tuple"].as_python_constant()
        if name == "where" or as_tuple:
            found = self._indices(translator, variable)
            return None if found is None else self._tuple(found)
        return self._nonzero(translator, variable)

    def item(self, translator: Any, variable: Any, index: Any) -> Any:
        """Return the index of a tensor with positions in place of masks, and numbers in place of
        tensors of one; None: it has no such, or they are not known."""
        several = isinstance(index, self._tuple)
        made, masks = [], 0
        for one in index.items if several else (index,):
            one = one.realize()
            kind = _value(one).dtype if self._is_ours(translator, one) else None
            if kind in _INTEGERS and not _value(one).dim():
                number = self._count(translator, one, "detach")
                made.append(one if number is None else constant(number))
                masks += number is not None
                continue
            if kind is not torch.bool:
                made.append(one)
                continue
            found = self._indices(translator, one)
            if found is None:
                return None
            made += found
            masks += 1
        if not masks or not self._is_ours(translator, variable):
            return None
        return self._tuple(made) if several or len(made) > 1 else made[0]

    def _unique(
        self, translator: Any, variable: Any, name: str, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        given = dict(zip(_UNIQUE[name], args, strict=False)) | kwargs
        asked = {key: one.as_python_constant() for key, one in given.items()}
        value = _value(variable)
        whole = value.dtype in (*_INTEGERS, torch.bool) and asked.get("dim") is None
        if not whole or not value.numel() or not asked.get("sorted", True):
            return None
        ordered = constant(name == "unique")
        first = self._function(_first_ones).call_function(translator, [variable, ordered], {})
        count = self._count(translator, first, "count_nonzero")
        if count is None:
            made = next(reversed(self.open))
            self.open[made] = variable.as_proxy().node.name
            return None
        wanted = [constant(asked.get(key, False)) for key in ("return_inverse", "return_counts")]
        made = self._function(_unique_of)
        return made.call_function(translator, [variable, ordered, constant(count), *wanted], {})

    def _bins(self, translator: Any, variable: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Count in as many bins as inputs need, or there are at least: as a rule there are no
        more."""
        given = dict(zip(("weights", "minlength"), args, strict=False)) | kwargs
        weights, value = given.get("weights", constant(None)), _value(variable)
        bins = int(given.get("minlength", constant(0)).as_python_constant())
        counted = value.dim() == 1 and value.dtype in _INTEGERS and not weights.is_tensor()
        if not counted or not value.numel():
            return None
        held = variable.call_method(translator, "clamp", [constant(0), constant(bins - 1)], {})
        outside = held.call_method(translator, "ne", [variable], {})
        count = self._count(translator, outside, "count_nonzero")
        if count is None and bins:
            whole = outside.call_method(translator, "any", [], {})
            self._assume(translator, whole.call_method(translator, "logical_not", [], {}))
        elif count != 0:
            largest = self._count(translator, variable, "max")
            below = variable.call_method(translator, "lt", [constant(0)], {})
            if largest is None or self._count(translator, below, "count_nonzero"):
                return None
            bins = max(bins, largest + 1)
        return self._function(_binned).call_function(translator, [variable, constant(bins)], {})

    def sizes_counted(self, traced: GraphModule) -> None:
        """Count where a graph, a copy of Dynamo's, selects only to know how many there are."""
        counts, selected = dict[str, Node](), list[Node]()
        for node in traced.graph.nodes:
            made = node.args[0] if node.target is operator.getitem else node
            name, given = getattr(made, "target", ""), getattr(made, "args", None) or [None]
            if node.name in self.open:
                counts[self.open[node.name]] = node
            elif getattr(name, "__name__", name) in _COUNTED and str(given[0]) in counts:
                selected.append(node)
            elif node.target is torch.ops.aten.sym_size.int and node.args[0] in selected:
                made = node.args[0]
                made = made.args[0] if made.target is operator.getitem else made
                with traced.graph.inserting_before(node):
                    number = traced.graph.call_method("item", (counts[made.args[0].name],))
                number.meta.update(node.meta)
                node.replace_all_uses_with(number)
                selected.append(node)
        for node in reversed(selected):
            if not node.users:
                traced.graph.erase_node(node)

    def _compared(
        self, translator: Any, variable: Any, name: str, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        if not self._is_ours(translator, args[0]):
            return None
        one, other = _value(variable), _value(args[0])
        if name == "equal" and one.shape != other.shape:
            return constant(False)
        if one.dtype is not other.dtype:
            return None
        found = variable.call_method(translator, _COMPARED[name], args, kwargs)
        whole = found.call_method(translator, "all", [], {})
        return whole.call_method(translator, "item", [], {})

    def _set(self, translator: Any, variable: Any, index: Any, value: Any) -> Any:
        # One number is set by the mask itself.
        if not self._is_ours(translator, value) or not _value(value).dim():
            return None
        index = self.item(translator, variable, index)
        if index is None:
            return None
        return variable.call_method(translator, "__setitem__", [index, value], {})

    def _nonzero(self, translator: Any, variable: Any) -> Any:
        if _value(variable).dim() == 0:
            return None
        count = self._count(translator, variable, "count_nonzero")
        if count is None:
            return None
        found = variable.call_method(translator, "nonzero_static", [], {"size": constant(count)})
        if _value(variable).dim() == 1 or not count:
            return found
        # Eager's positions in one dimension lie together.
        for how in ("t", "contiguous", "t"):
            found = found.call_method(translator, how, [], {})
        return found

    def _indices(self, translator: Any, variable: Any) -> list[Any] | None:
        found = self._nonzero(translator, variable)
        if found is None:
            return None
        unbound = found.call_method(translator, "unbind", [constant(1)], {})
        return list(unbound.unpack_var_sequence(translator))

    def _masked(self, translator: Any, variable: Any, mask: Any) -> Any:
        # Its gradient would be summed, not put in place: other signs of zeros.
        one = _value(variable)
        if one.requires_grad or not self._is_ours(translator, mask):
            return None
        indices = self._indices(translator, mask) if _value(mask).shape == one.shape else None
        if indices is None:
            return None
        return variable.call_method(translator, "__getitem__", [self._tuple(indices)], {})

    def _repeated(
        self, translator: Any, variable: Any, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        given = dict(zip(("repeats", "dim"), args, strict=False)) | kwargs
        repeats = given.get("repeats")
        ours = self._is_ours(translator, repeats) and _value(repeats).dtype in _INTEGERS
        if not ours or _value(repeats).shape in ((), (1,)):
            return None
        count = self._count(translator, repeats, "sum")
        if count is None:
            return None
        taken = [variable, repeats, constant(count), given.get("dim", constant(None))]
        return self._function(_repeated).call_function(translator, taken, {})


def _value(variable: Any) -> Any:
    return variable.as_proxy().node.meta["example_value"]


def _repeated(given: Tensor, repeats: Tensor, size: int, dim: int | None) -> Tensor:
    """Compute what repeat_interleave does, whose kernels fail where `size` is not the sum: a GPU
    takes no more work then."""
    given = given.flatten() if dim is None else given
    if repeats.shape != given.shape[dim or 0 :][:1]:
        return given.repeat_interleave(repeats, dim)  # torch's error
    places = torch.arange(size, device=repeats.device)
    index = torch.searchsorted(repeats.cumsum(0), places, right=True)
    return given.index_select(dim or 0, index.clamp(max=repeats.shape[0] - 1))


def _binned(given: Tensor, bins: int) -> Tensor:
    """Compute what torch.bincount does, of numbers below `bins`."""
    index = given.long().clamp(0, bins - 1)
    return index.new_zeros(bins).scatter_add(0, index, torch.ones_like(index))


def _first_ones(given: Tensor, ordered: bool) -> Tensor:
    """Return where a number differs from the one before it."""
    flat = given.flatten().sort()[0] if ordered else given.flatten()
    return torch.cat((flat.new_ones(1, dtype=torch.bool), flat[1:] != flat[:-1]))


def _unique_of(given: Tensor, ordered: bool, count: int, inverse: bool, counts: bool) -> Any:
    """Compute what torch.unique does, of so many numbers, by operators of fixed sizes."""
    flat, order = given.flatten().sort() if ordered else (given.flatten(), None)
    first = _first_ones(given, ordered)
    places = first.nonzero_static(size=count)[:, 0]
    found = [flat[places]]
    if inverse:
        ranks = first.cumsum(0) - 1
        ranks = ranks if order is None else torch.empty_like(ranks).scatter_(0, order, ranks)
        found.append(ranks.view(given.shape))
    if counts:
        found.append(places.diff(append=places.new_full((1,), flat.shape[0])))
    return tuple(found) if len(found) > 1 else found[0]
