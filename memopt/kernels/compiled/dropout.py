"""Random numbers as a function of a seed: one random operator draws all seeds of a step.

A dropout whose numbers come from the process's generator is not a function of its operands: run
again as a part of a kernel, it draws other numbers. In regions it reads a seed instead, and its
mask is not kept: each kernel that reads it, in the backward or run again, computes it in registers.
The seeds are drawn once a step, from the process's generator, so that after `manual_seed` a step
drops the same elements; they are not those that eager drops.

The number of an element is a hash of its index in 32-bit integers, which compilers vectorise, with
the finalisers of MurmurHash3 and of lowbias32 (Wellons 2018), each after one half of the seed. An
element is kept where the lower 31 bits are p · 2^31 or more.

C++ compilers assume that signed integers do not overflow. From an index alone, bounded by a loop,
they infer where a product would overflow, and that the loop ends before: GCC 12 dropped its end. So
the seed, which they cannot bound, comes first.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node

from memopt.step.dropout import EAGER_DROPOUT
from memopt.step.operators import define

_ATEN = torch.ops.aten
_LARGEST = 2**31
_FIRST = ((16, -2048144789), (13, -1028477387), (16, 1))
_SECOND = ((16, 2146121005), (15, -2073254261), (16, 1))
"""Finalisers: (bits to shift right by, factor)."""
_ROUNDS = ((_ATEN.bitwise_xor.Tensor, _FIRST), (_ATEN.add.Tensor, _SECOND))
"""For each half of the seed: the operator that joins it to the hash, and the finaliser after it."""


def _drawn(count: int, device: torch.device) -> torch.Tensor:
    return torch.randint(-_LARGEST, _LARGEST, (count, 2), device=device, dtype=torch.int32)


def _described(count: int, device: torch.device) -> torch.Tensor:
    return torch.empty((count, 2), dtype=torch.int32, device=device)


SEEDS = define(
    "seeds(int count, Device device) -> Tensor",
    _drawn,
    _described,
    tags=(torch.Tag.nondeterministic_seeded,),
)
"""`memopt::seeds(count, device)`: the seeds of a step, int32, two for each of `count` dropouts."""


def is_dropout(node: Node) -> bool:
    """Return whether a node is a dropout that keeps some elements and drops some."""
    if node.target not in (_ATEN.native_dropout.default, EAGER_DROPOUT):
        return False
    x, p, train = node.args
    count = x.meta["val"].numel()  # type: ignore[union-attr]
    return train is not False and 0.0 < float(p) < 1.0 and 0 < count < _LARGEST  # type: ignore[arg-type]


def mask_of(node: Node) -> Node | None:
    """Return the node that names the mask of a dropout; None: nothing reads it."""
    named = (u for u in node.users if u.target is operator.getitem and u.args[1] == 1)
    return next(named, None)


def kept_elements(graph: FxGraph, like: torch.Tensor, p: float, seed: Node) -> Node:
    """Add the mask of a dropout, made from its seed, to a graph: True where an element is kept.

    Args:
        graph: gets the nodes.
        like: the dropout's input (fake), of any shape.
        p: the share that is dropped.
        seed: int32, of shape (2,).
    """

    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        return graph.call_function(target, args, kwargs)

    count = math.prod(like.shape)
    bits = call(_ATEN.arange.start_step, 0, count, 1, dtype=torch.int32, device=like.device)
    bits = call(_ATEN.view.default, bits, list(like.shape))
    for half, (joined, rounds) in enumerate(_ROUNDS):
        bits = call(joined, bits, call(_ATEN.select.int, seed, 0, half))
        for shift, factor in rounds:
            shifted = call(_ATEN.__rshift__.Scalar, bits, shift)
            shifted = call(_ATEN.bitwise_and.Scalar, shifted, 2 ** (32 - shift) - 1)
            bits = call(_ATEN.bitwise_xor.Tensor, bits, shifted)
            if factor != 1:
                bits = call(_ATEN.mul.Tensor, bits, factor)
    bits = call(_ATEN.bitwise_and.Scalar, bits, _LARGEST - 1)
    return call(_ATEN.ge.Scalar, bits, min(round(p * _LARGEST), _LARGEST - 1))


def dropped_out(graph: FxGraph, x: Node, p: float, mask: Node) -> Node:
    """Add the result of a dropout with a given mask to a graph."""
    kept = graph.call_function(_ATEN.mul.Tensor, (x, mask))
    return graph.call_function(_ATEN.mul.Tensor, (kept, 1.0 / (1.0 - p)))
