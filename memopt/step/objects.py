"""Opens arguments that are objects: batches as dataclasses, mappings, namespaces and plain classes.

A graph takes tensors and numbers. An object that is no container to torch (pytree) is opened here
into its attributes; the forward, and its trace, get an object of the same class that is made of
them without running its `__init__`.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
from torch import nn

from memopt.torch_private import pytree

_PLAIN = (torch.Tensor, str, int, float, bool, type(None))
_NEVER = (nn.Module, torch.Generator, Enum, type)
_MADE_BY_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_ITEMS = "items of the dict"


class Opened:
    """An object as a container of its attributes; unflattened, it is the object again.

    Attributes:
        kind: its class.
        names: the attributes' names; for a dict, also `_ITEMS`.
        values: the attributes' values, objects in them opened likewise.
    """

    def __init__(self, kind: type, names: tuple[str, ...], values: tuple[Any, ...]) -> None:
        self.kind, self.names, self.values = kind, names, values


def _flatten(opened: Opened) -> tuple[list[Any], tuple[type, tuple[str, ...]]]:
    return list(opened.values), (opened.kind, opened.names)


def _unflatten(values: Any, context: tuple[Any, tuple[str, ...]]) -> Any:
    """Make the object. Dynamo traces this."""
    kind, names = context
    made = kind.__new__(kind)
    for name, value in zip(names, values, strict=True):
        if name == _ITEMS:
            dict.update(made, value)
        else:
            object.__setattr__(made, name, value)
    return made


pytree.register_pytree_node(Opened, _flatten, _unflatten)


def opened(tree: Any) -> Any:
    """Return a tree of arguments with its objects as containers; the tree itself if it has none."""
    if not any(map(is_object, pytree.tree_leaves(tree))):
        return tree
    return _opened(tree, ())


def as_tuples(tree: Any) -> Any:
    """Return a tree that `opened` made, with tuples in place of objects: the same leaves."""

    def one(node: Any) -> Any:
        return tuple(map(as_tuples, node.values)) if isinstance(node, Opened) else node

    return pytree.tree_map(one, tree, is_leaf=lambda node: isinstance(node, Opened))


def objects_in(tree: Any, around: tuple[int, ...] = ()) -> Iterator[Any]:
    """Yield the objects in a tree that are opened, and those inside them."""
    for leaf in filter(is_object, pytree.tree_leaves(tree)):
        if id(leaf) not in around:
            yield leaf
            yield from objects_in(list(attributes(leaf).values()), (*around, id(leaf)))


def _opened(tree: Any, around: tuple[int, ...]) -> Any:
    def one(leaf: Any) -> Any:
        # An object that holds itself stays closed, and is refused as an object.
        if not is_object(leaf) or id(leaf) in around:
            return leaf
        held = attributes(leaf)
        values = (_opened(value, (*around, id(leaf))) for value in held.values())
        return Opened(type(leaf), tuple(held), tuple(values))

    return pytree.tree_map(one, tree)


def is_object(leaf: Any) -> bool:
    """Return whether a leaf's class is written in Python, with all state in attributes or items."""
    if isinstance(leaf, (*_PLAIN, *_NEVER)):
        return False
    kind = type(leaf)
    made_by = dict.__new__ if isinstance(leaf, dict) else object.__new__
    return bool(kind.__flags__ & _MADE_BY_PYTHON) and kind.__new__ is made_by


def attributes(one: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, sorted; for a dict, also its items."""
    held = dict(getattr(one, "__dict__", {}))
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(one, name):
                held[name] = getattr(one, name)
    if isinstance(one, UserDict):
        # A mapping is its items: a tokenizer's other attributes do not concern a forward.
        held = {n: v for n, v in held.items() if n == "data" or isinstance(v, _PLAIN)}
    if isinstance(one, dict):
        held[_ITEMS] = dict(one)
    return dict(sorted(held.items()))
