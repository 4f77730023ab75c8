"""Captures with joint graphs from disk, and what is to be the same in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from memopt.profiler import joint_cache
from memopt.profiler.capture import Captured, capture
from memopt.profiler.joint_store import JointStore
from memopt.profiler.training_call import training_call


class Reads:
    """What a store was asked for, and answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: list[str] = []
        self.known = 0
        self.stored = 0
        load, store, unpacked = JointStore.load, JointStore.store, joint_cache._unpacked

        def load_(this: JointStore, key: str) -> bytes | None:
            self.keys.append(key)
            return load(this, key)

        def store_(this: JointStore, key: str, graph: bytes) -> None:
            self.stored += 1
            store(this, key, graph)

        def unpacked_(*args: Any) -> Any:
            found = unpacked(*args)
            self.known += found is not None
            return found

        monkeypatch.setattr(JointStore, "load", load_)
        monkeypatch.setattr(JointStore, "store", store_)
        monkeypatch.setattr(joint_cache, "_unpacked", unpacked_)


def captured(model: nn.Module, inputs: Any, joints: JointStore | None = None) -> Captured:
    return capture(model, training_call(model, inputs), joints=joints)


def lines(made: Captured) -> list[tuple[object, ...]]:
    """All that later steps can read of a captured graph, node by node; memory by its number."""
    memories: dict[int, int] = {}
    order: dict[Node, int] = {}
    numbers = [n.meta["seq_nr"] for n in made.module.graph.nodes if "seq_nr" in n.meta]
    first = min(numbers, default=0)

    def value(one: Any) -> object:
        if isinstance(one, (list, tuple)):
            return [type(one), *map(value, one)]
        if not isinstance(one, Tensor):
            return repr(one)
        memory = one.untyped_storage()
        return (
            type(one),
            memories.setdefault(memory._cdata, len(memories)),
            memory.nbytes(),
            (one.shape, one.stride(), one.storage_offset()),
            (one.dtype, one.device, one.requires_grad, one.is_conj(), one.is_neg()),
        )

    def meta(node: Node) -> dict[str, object]:
        said = dict(node.meta)
        found: dict[str, object] = {"val": value(said.pop("val", None))}
        found["modules"] = [path for path, _ in (said.pop("nn_module_stack", None) or {}).values()]
        if "seq_nr" in said:
            found["place"] = said.pop("seq_nr") - first
        read = ("desc", "partitioner_tag", "stack_trace", "autograd_backward", "is_gradient_acc")
        return found | {name: repr(said[name]) for name in read if name in said}

    made_of = []
    for place, node in enumerate(made.module.graph.nodes):
        given = torch.fx.node.map_arg((node.args, node.kwargs), order.__getitem__)
        order[node] = place
        made_of.append((node.op, node.target, node.name, repr(given), meta(node)))
    rest = (made.mutated, made.given, made.outputs, made.trace, len(made.tangents))
    held = [(p.kind, p.name, p.index, p.part) for p in made.primals]
    return [*made_of, (repr(rest), repr(held))]


class Block(nn.Module):
    """Linear, dropout, batch norm and attention; a view of the input is added at the end."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(self.first(x)).relu())
        z = self.second(y).view(1, 2, -1, 8)
        return nn.functional.scaled_dot_product_attention(z, z, z).flatten() + x.reshape(-1)


def inputs() -> Tensor:
    return torch.randn(6, 8)


def set_to(function: Callable[[Any], None], value: Any, before: Any) -> Any:
    @contextlib.contextmanager
    def context() -> Any:
        function(value)
        try:
            yield
        finally:
            function(before)

    return context


def flag(home: Any, name: str, value: Any) -> Any:
    return set_to(lambda one: setattr(home, name, one), value, getattr(home, name))


def database(folder: Path) -> Path:
    return folder / "graphs-v1" / "graphs.sqlite"
