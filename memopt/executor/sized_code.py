"""The code of one program for steps that differ in their sizes alone.

The program's code is written for the captures of a few lengths. Where the texts differ in nothing
but numbers, each of these is a polynomial of the length (`memopt.capture.any_length` proves that
all sizes are), and so the code for another length is the same code over other numbers.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from memopt.executor.codegen import compiled, either, written
from memopt.executor.handover import Yielding, made_later
from memopt.executor.installed import Installed
from memopt.executor.partial_backward import unknown
from memopt.executor.values import Halves
from memopt.models.graph import Graph
from memopt.models.same_graph import graph_difference
from memopt.step.build import Lowering
from memopt.step.captured import Captured
from memopt.step.signature import values_of

_NUMBER = re.compile(r"(?<![\w.])(?<!e-)(?<!e\+)\d+(?![\w.])")
"""A whole number in generated code, no part of a name or of a fraction."""

Polynomial = tuple[int, ...]
"""Its coefficients, that of the constant first."""


def polynomial_through(points: Mapping[int, int]) -> Polynomial | None:
    """Return the polynomial of least degree through points; None: its coefficients are no whole
    numbers."""
    found = [Fraction(0)] * len(points)
    for at, value in points.items():
        # Lagrange's basis polynomial, which is 1 at this point and 0 at the others.
        basis = [Fraction(1)]
        for other in points:
            if other == at:
                continue
            shifted = [Fraction(0), *basis]
            basis = [a - other * b for a, b in zip(shifted, [*basis, Fraction(0)], strict=True)]
            basis = [one / (at - other) for one in basis]
        found = [a + value * b for a, b in zip(found, basis, strict=True)]
    if any(one.denominator != 1 for one in found):
        return None
    return tuple(int(one) for one in found)


class SizedCode:
    """The code of a program, for every length up to that of its plan.

    Args:
        installed: the plan's program.
        captures: length → the model's capture at that length, lowered as the plan's. The first is
            the plan's.
        degree: the largest degree of any size in the length.

    Raises:
        ValueError: too few of the steps differ in their sizes alone; the message says where.
    """

    def __init__(
        self,
        installed: Installed,
        captures: Mapping[int, tuple[Captured, Lowering]],
        degree: int,
    ) -> None:
        assert installed.origin is not None
        self._installed, self._origin = installed, installed.origin
        self._length, self._degree = next(iter(captures)), degree
        found = {at: _under(installed.origin.halves, *one) for at, one in captures.items()}
        planned = found[self._length]
        reasons = {at: why_not_alike(planned, one) for at, one in found.items()}
        self._halves = {at: one for at, one in found.items() if reasons[at] is None}
        if len(self._halves) <= degree:
            raise ValueError(next((x for x in reasons.values() if x), "too few lengths are known"))
        sizes = {at: _storage_bytes(one.lowering) for at, one in self._halves.items()}
        rows = zip(*sizes.values(), strict=True)
        self._bytes = np.array([self._through(tuple(sizes), row) for row in rows], dtype=np.int64)
        halved = (False, True) if installed.in_halves else (False,)
        self._code = {(one, True): self._written(one, True) for one in halved}

    def _written(self, halved: bool, direct: bool) -> tuple[dict[str, Any], dict[str, Polynomial]]:
        """Return the scope of the functions, themselves included, and the size that each name in it
        stands for; `halved`: with the backward in two halves.

        At a length with a coincidence (a slice that is the whole tensor) the text may differ: the
        text that most lengths share is taken.
        """
        origin = self._origin
        alike: dict[tuple[str, ...], dict[int, tuple[list[str], dict[str, Any]]]] = {}
        for at, one in self._halves.items():
            parts = one.first_half if halved else None
            source, scope = written(one, origin.swap, origin.random, in_parts=parts, direct=direct)
            texts = tuple(_NUMBER.split(source))
            alike.setdefault(texts, {})[at] = _NUMBER.findall(source), scope
        texts, made = max(alike.items(), key=lambda pair: len(pair[1]))
        if len(made) <= self._degree:
            raise ValueError("the code differs in more than numbers")
        scopes = [scope for _, scope in made.values()]
        for other in scopes[1:]:
            if scopes[0].keys() != other.keys():
                raise ValueError("the code calls other kernels")
            for name, value in scopes[0].items():
                if not _same(value, other[name]):
                    raise ValueError(f"{name} is another value")
        names: dict[Polynomial, str] = {}
        lines = [texts[0]]
        numbers = zip(*(found for found, _ in made.values()), strict=True)
        for column, text in zip(numbers, texts[1:], strict=True):
            if len(set(column)) == 1:
                lines += (column[0], text)
                continue
            polynomial = self._through(tuple(made), tuple(map(int, column)))
            lines += (names.setdefault(polynomial, f"size_{len(names)}"), text)
        compiled("".join(lines), scopes[0])
        return scopes[0], {name: polynomial for polynomial, name in names.items()}

    def _through(self, lengths: Sequence[int], values: Sequence[int]) -> Polynomial:
        """Return a size in terms of the length.

        Raises:
            ValueError: it is no polynomial of the degree that was proved.
        """
        found = polynomial_through(dict(zip(lengths, values, strict=True)))
        if found is None or any(found[self._degree + 1 :]):
            raise ValueError(f"a size is no polynomial of the length: {tuple(values)}")
        return found[: self._degree + 1]

    def why_not(self, length: int) -> str | None:
        """Return why the code for a length would not keep the plan's memory; None: it does."""
        if length > self._length:
            return "it is longer than the plan's"
        powers = range(self._degree + 1)
        most, own = (
            self._bytes @ np.array([one**power for power in powers], dtype=np.int64)
            for one in (self._length, length)
        )
        if (own < 0).any() or (own > most).any():
            return "a tensor is larger in a shorter step"
        return None

    def at(self, length: int) -> Installed:
        """Return the program for a length."""

        def functions(halved: bool, direct: bool) -> tuple[Any, Any]:
            if (halved, direct) not in self._code:
                self._code[halved, direct] = self._written(halved, direct)
            scope, sizes = self._code[halved, direct]
            own = dict(scope)
            for name, polynomial in sizes.items():
                own[name] = sum(a * length**power for power, a in enumerate(polynomial))
            made = (types.FunctionType(own[name].__code__, own, name) for name in _FUNCTIONS)
            forward, backward = made
            return forward, backward

        def both(halved: bool) -> tuple[Any, Any]:
            otherwise = functools.cache(functools.partial(functions, halved, False))
            return either(functions(halved, True), otherwise)

        def yielding() -> Yielding:
            made: Yielding = both(True)[1]
            return made

        (forward, backward), random = both(False), self._origin.random
        in_halves = self._installed.in_halves and made_later(yielding, random)
        return replace(
            self._installed,
            forward=random.settling(forward),
            backward=random.settling(backward),
            handover=None,
            partial=unknown,
            in_halves=in_halves,
            origin=None,
        )


_FUNCTIONS = ("forward", "backward")


def _under(planned: Halves, captured: Captured, lowering: Lowering) -> Halves:
    """Return a program's halves in another capture, with the same host addresses."""
    made = replace(planned, captured=captured, lowering=lowering)
    made.__dict__["host_placement"] = planned.host_placement
    return made


def _storage_bytes(lowering: Lowering) -> list[int]:
    """Return the bytes of each tensor's storage, before an allocator rounds them up."""
    found = [0] * len(lowering.graph.tensors)
    for node, held in lowering.storages.items():
        for tensor, value in zip(held, values_of(node), strict=False):
            if tensor is None or tensor >= len(found):
                continue  # written by alternatives that the plan does not choose
            if isinstance(value, torch.Tensor):
                found[tensor] = max(found[tensor], value.untyped_storage().nbytes())
    return found


def why_not_alike(one: Halves, other: Halves) -> str | None:
    """Return a difference of the steps of two captures other than in sizes; None if there is
    none."""
    first, second = one.captured, other.captured
    fixed = _why_fixed(first) or _why_fixed(second)
    if fixed is not None:
        return fixed
    reason = graph_difference(one.lowering.graph, _resized(other.lowering.graph, one))
    if reason is None and _facts(first) != _facts(second):
        return "they differ in their inputs or outputs"
    return reason


def _resized(graph: Graph, like: Halves) -> Graph:
    """Return a graph with the sizes of another, whose tensors have the same names."""
    other = like.lowering.graph
    tensors = [
        replace(mine, size_bytes=yours.size_bytes)
        for mine, yours in zip(graph.tensors, other.tensors, strict=False)
    ]
    return replace(
        graph,
        tensors=(*tensors, *graph.tensors[len(tensors) :]),
        operators=graph.operators,
        extra_resident_bytes=other.extra_resident_bytes,
    )


def _facts(captured: Captured) -> tuple[Any, ...]:
    """Return the facts in which steps of two lengths must agree beside their graph."""
    outputs, gradients = captured.outputs, captured.outputs.gradients
    return (
        [(one.kind, one.name, one.index, one.part) for one in captured.primals],
        captured.given,
        captured.mutated,
        captured.device,
        str(captured.effects),
        [one is None for one in captured.gradients],
        (outputs.count, outputs.copied, outputs.repeated, outputs.given, outputs.shared),
        (gradients.unused, gradients.dropped),
        [position for position, _ in gradients.strides],
    )


def _why_fixed(captured: Captured) -> str | None:
    """Return why a capture serves one length only; None: it may serve several."""
    if not captured.effects.are_constant:
        return "the forward leaves values behind that differ at each call"
    if captured.outputs.beside:
        return "gradients go past the planned backward"
    if any(one.constant is not None and one.reader is None for one in captured.primals):
        return "the forward makes a tensor when it is traced"
    if any(one.part for one in captured.primals):
        return "a parameter is sharded"
    tangents = (one.meta["val"] for one in captured.tangents)
    if not all(one.is_contiguous() for one in tangents):
        return "the gradient of an output is not row-major"
    return None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other or (
            type(one) is type(other)
            and (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
            and torch.equal(one, other)
        )
    return one is other or (type(one) is type(other) and (one == other or one != one))
