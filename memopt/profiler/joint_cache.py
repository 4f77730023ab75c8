"""Joint graphs that AOTAutograd has traced before, in this process or another, from disk.

To trace a model's backward takes a third of the time to its plan, and gives the same graph each
time: dynamo's graph, the inputs' layouts and torch's settings decide it (`joint_key`). Dynamo
itself traces the model each time, since only that can tell whether the model is still the same.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from memopt.errors import CaptureError
from memopt.profiler.as_eager.updates import described_rightly
from memopt.profiler.joint_key import (
    Nameless,
    function_name,
    joint_key,
    stacks_of,
    tensor_text,
    traced_plainly,
)
from memopt.profiler.joint_store import JointStore
from memopt.torch_private import pytree
from memopt.torch_private.access import private
from memopt.torch_private.aot import joint_tracer, joint_tracer_replaced
from memopt.torch_private.operators import OpOverload, schema_of
from memopt.torch_private.whole_kernels import ONE_TRACE_AT_A_TIME

_LOG = logging.getLogger(__name__)

FEWEST_NODES = 100
"""Of dynamo's graph; the joint graph of a smaller one is traced in no time."""
_KEPT = frozenset(
    {
        "autograd_backward",
        "desc",
        "is_functional_regenerated",
        "is_gradient_acc",
        "partitioner_tag",
        "seq_nr",
        "val",
    }
)
"""What is kept of a joint graph's nodes beside the stacks, which dynamo's nodes have."""
_NOT_READ = frozenset(
    {"eager_input_vals", "from_node", "original_aten", "source_fn_stack", "tensor_meta"}
)
"""What nothing reads any more."""
_STACKS = frozenset({"nn_module_stack", "stack_trace"})
_SUM_OF_GRADIENTS = "Gradient addition node"
"""Begins what AOTAutograd writes below the source lines of a sum of gradients."""


@contextlib.contextmanager
def joint_graphs_kept(
    traced: GraphModule, device: torch.device | None, store: JointStore | None
) -> Iterator[None]:
    """Inside, AOTAutograd traces `traced` unless its joint graph is known.

    Args:
        traced: dynamo's graph.
        device: where its kernels run; None: it is traced in any case.
        store: keeps joint graphs; None: it is traced in any case.
    """
    trace = _tracer() if len(traced.graph.nodes) >= FEWEST_NODES else None
    if store is None or device is None or trace is None:
        yield
        return
    thread = threading.get_ident()

    def known_or_traced(
        function: Callable[..., Any], args: Any, args_descs: Any = None, **options: Any
    ) -> Any:
        def make() -> Any:
            return trace(function, args, args_descs, **options)

        if threading.get_ident() != thread or args_descs is None:
            return make()
        given, _ = pytree.tree_flatten(args)
        descriptors, _ = pytree.tree_flatten(args_descs)
        try:
            key = joint_key(traced, given, descriptors, device)
        except (Nameless, CaptureError, AttributeError) as error:
            # AttributeError and CaptureError: this torch has moved what a key is made of.
            _LOG.debug("a joint graph has no key: %s", error)
            return make()
        data = store.load(key)
        found = None if data is None else _unpacked(data, traced, given, descriptors)
        if found is None:
            found = make()
            packed = _packed(found, traced)
            if packed is not None:
                store.store(key, packed)
        return found

    with ONE_TRACE_AT_A_TIME, joint_tracer_replaced(known_or_traced):
        yield


def _tracer() -> Any:
    """What traces joint graphs in AOTAutograd; None: somebody looks on who would miss the trace, or
    this torch has other names."""
    return joint_tracer() if traced_plainly() else None


def _packed(joint: GraphModule, traced: GraphModule) -> bytes | None:
    """A joint graph as bytes; None if it holds what another process could not make again."""
    try:
        for node in joint.graph.nodes:
            _check(node)
        return zlib.compress(_pickled(joint, _beside(joint, traced)), 1)
    except Exception as error:  # noqa: BLE001  # a pickler may raise anything; it is traced again
        _LOG.debug("a joint graph is not kept: %s", error)
        return None


def _check(node: Node) -> None:
    """Refuse a node of a joint graph that a file cannot hold.

    Raises:
        Nameless: the reason.
    """
    if node.op not in ("placeholder", "call_function", "output"):
        raise Nameless(f"a {node.op} in the joint graph")
    if node.op == "call_function" and node.target not in described_rightly().values():
        function_name(node.target)
        if isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable:
            raise Nameless(f"{node.target}, an update that is left in the joint graph")
    unknown = node.meta.keys() - _KEPT - _NOT_READ - _STACKS
    if unknown:
        raise Nameless(f"a node with {', '.join(sorted(unknown))}")
    for value in pytree.tree_leaves(node.meta.get("val")):
        if value is not None:
            tensor_text(value)


@dataclass(frozen=True)
class _Beside:
    """What torch's pickler leaves out of a joint graph's node.

    Attributes:
        modules: the first node of dynamo's graph with its stack of modules; None: it has none.
        source: the first one with its source lines; None: it has none.
        added: what AOTAutograd has written below those.
        storage_bytes: of its tensors' memory, which may be larger than they are.
    """

    modules: int | None
    source: int | None
    added: str
    storage_bytes: tuple[int, ...]

    def restore(self, node: Node, traced: Sequence[Node]) -> None:
        """Give a node what it had; `traced` are the nodes of dynamo's graph."""
        if self.modules is not None:
            node.meta["nn_module_stack"] = traced[self.modules].meta["nn_module_stack"]
        if self.source is not None:
            node.meta["stack_trace"] = traced[self.source].meta["stack_trace"] + self.added
        for value, size_bytes in zip(_tensors(node), self.storage_bytes, strict=True):
            storage = value.untyped_storage()
            if storage.nbytes() != size_bytes:
                storage.resize_(size_bytes)


def _beside(joint: GraphModule, traced: GraphModule) -> list[_Beside]:
    """What torch's pickler leaves out of a joint graph, node by node.

    Raises:
        Nameless: a node comes from somewhere else than dynamo's graph.
    """
    modules: dict[str | None, int | None] = {}
    sources: dict[str | None, int | None] = {}
    for place, node in enumerate(traced.graph.nodes):
        module, source = stacks_of(node)
        modules.setdefault(module, place)
        sources.setdefault(source, place)
    modules[None] = sources[None] = None
    found = []
    for node in joint.graph.nodes:
        module, source = stacks_of(node)
        head, mark, rest = (source or "").partition(_SUM_OF_GRADIENTS)
        known = head if mark else source
        if module not in modules or known not in sources:
            raise Nameless("a node from lines that are not in dynamo's graph")
        sizes = tuple(value.untyped_storage().nbytes() for value in _tensors(node))
        found.append(_Beside(modules[module], sources[known], mark + rest, sizes))
    return found


def _tensors(node: Node) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _pickled(joint: GraphModule, beside: list[_Beside]) -> bytes:
    options = private("torch.fx._graph_pickler.Options")(
        ops_filter=None, node_metadata_key_filter=_KEPT.__contains__
    )
    graph = joint.graph
    try:
        # Without what the tracer has left in the module.
        pickler = private("torch.fx._graph_pickler.GraphPickler")
        data: bytes = pickler.dumps((_module(graph), beside), options)
        return data
    finally:
        graph.owning_module = joint


def _module(graph: Graph) -> GraphModule:
    make = private("torch.fx._lazy_graph_module._make_graph_module")
    module: GraphModule = make(torch.nn.Module(), graph)
    return module


def _unpacked(
    data: bytes, traced: GraphModule, given: list[Any], descriptors: list[Any]
) -> GraphModule | None:
    """The joint graph in these bytes, for these inputs; None if they hold none."""
    described_rightly()  # defines the operators
    try:
        with warnings.catch_warnings():
            # torch's own, of a class that its pickler still asks for.
            warnings.simplefilter("ignore", FutureWarning)
            pickler = private("torch.fx._graph_pickler.GraphPickler")
            bare, beside = pickler.loads(zlib.decompress(data), given[0].fake_mode)
    except Exception as error:  # noqa: BLE001  # what the bytes ask for is not here
        _LOG.debug("a joint graph cannot be read: %s", error)
        return None
    joint = _module(bare.graph)
    inputs = joint.graph.find_nodes(op="placeholder")
    if [_input(n.meta["desc"], n.meta["val"]) for n in inputs] != [
        _input(descriptor, value) for descriptor, value in zip(descriptors, given, strict=True)
    ]:
        return None
    sources = list(traced.graph.nodes)
    for node, one in zip(joint.graph.nodes, beside, strict=True):
        one.restore(node, sources)
    return joint


def _input(descriptor: Any, value: torch.Tensor) -> tuple[object, ...]:
    return repr(descriptor), value.shape, value.stride(), value.dtype, value.device
