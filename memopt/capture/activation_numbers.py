"""Takes numbers of activations into graphs: `h / h.abs().max().item()`.

Eager computes with such a number in Python, in 64 bits, and hands it to operators of tensors as a
number. A graph holds tensors alone. So a tensor on the host, of 64 bits, stands for the number, and
an operator that is given one runs torch's own with the number in it: the same call with the same
bits, in the forward and the backward.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from memopt.step.input_values import NUMBERS
from memopt.step.operators import define, functional_name
from memopt.torch_private import pytree
from memopt.torch_private.aot import FakeTensor
from memopt.torch_private.operators import OpOverload, aten, schema_of

_READ = aten._local_scalar_dense.default
_KINDS = {torch.SymFloat: torch.float64, torch.SymInt: torch.int64, torch.SymBool: torch.bool}
_HOMES = {"_operator": operator, "builtins": builtins, "math": math, "torch": torch}
_PLAIN = (bool, float, int)
_COPIED = ("nn_module_stack", "stack_trace")


def _number(given: list[Tensor], call: str, kind: torch.dtype) -> Tensor:
    """Compute a number in Python from those in tensors; `call`: home and name of the function, and
    its arguments, None for a tensor's number. "": it is the one tensor's."""
    numbers = iter([one.item() for one in given])
    if not call:
        return torch.tensor(next(numbers), dtype=kind, device="cpu")
    home, name, arguments = json.loads(call)
    filled = (next(numbers) if one is None else one for one in arguments)
    return torch.tensor(getattr(_HOMES[home], name)(*filled), dtype=kind, device="cpu")


def _described(_given: list[Tensor], _call: str, kind: torch.dtype) -> Tensor:
    return torch.empty((), dtype=kind, device="cpu")


_NUMBER = define("number(Tensor[] given, str call, ScalarType kind) -> Tensor", _number, _described)


def _of_math(name: str, first: float, second: float | None = None) -> Tensor:
    given = (first,) if second is None else (first, second)
    return torch.tensor(getattr(math, name)(*given), dtype=torch.float64, device="cpu")


def _of_math_described(_name: str, _first: float, _second: float | None = None) -> Tensor:
    return torch.empty((), dtype=torch.float64, device="cpu")


IN_PYTHON = define(
    "of_math(str name, Scalar first, Scalar? second=None) -> Tensor", _of_math, _of_math_described
)
"""Computes a function of the module math."""


def of_math(node: Node, number: Callable[[Any], Any]) -> Any:
    """Return what a node of `IN_PYTHON` computes of its arguments' numbers; None: it fails, or one
    is not known."""
    name, *given = node.args
    with contextlib.suppress(TypeError, ValueError, ArithmeticError):
        return getattr(math, str(name))(*map(number, given))
    return None


def with_tensors_of_numbers(traced: GraphModule) -> None:
    """Compute the numbers that operators of tensors are given in Dynamo's graph by operators, in
    place. Numbers that a function makes which is not known here stay."""
    graph, made = traced.graph, dict[Node, Node]()
    for node in list(graph.nodes):
        kind, call = _kind(node), _call_of(node, made)
        if kind is None or call is None or not _is_given_on(node):
            continue
        with graph.inserting_before(node):
            if call:
                given = [made[one] for one in node.args if isinstance(one, Node)]
            else:
                given = [_inserted(graph.call_method("detach", node.args[:1]), node)]
                given[0].meta["example_value"] = node.args[0].meta["example_value"].detach()
            tensor = made[node] = _inserted(graph.call_function(_NUMBER, (given, call, kind)), node)
            example = given[0].meta["example_value"]
            tensor.meta["example_value"] = example.new_empty((), dtype=kind, device="cpu")
            number = _inserted(graph.call_method("item", (tensor,)), node)
        number.meta["example_value"] = node.meta["example_value"]
        node.replace_all_uses_with(number, lambda user: _kind(user) is None)
    if made:
        _return_tensors(traced)
        for node in reversed(graph.nodes):
            if not node.users and (node in made or node.target == "item"):
                graph.erase_node(node)
        traced.recompile()


def _return_tensors(traced: GraphModule) -> None:
    """Return numbers in tensors, in place; the graph's `meta` says which results these are."""
    output: Any = traced.graph.output_node()
    leaves = list(output.args[0])
    of = {i: one.args[0] for i, one in enumerate(leaves) if getattr(one, "target", "") == "item"}
    found = {i: tensor for i, tensor in of.items() if tensor.target is _NUMBER}
    output.args = (tuple(found.get(i, leaf) for i, leaf in enumerate(leaves)),)
    traced.meta[NUMBERS] = frozenset(found)


def _kind(node: Node) -> torch.dtype | None:
    """Return the dtype of 64 bits of a node's number; None: it is no number."""
    return _KINDS.get(type(node.meta.get("example_value")))


def _is_given_on(node: Node) -> bool:
    """Return whether an operator of tensors is given a number, or one that is computed from it."""
    waiting, seen = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            if _kind(user) is None:
                return True
            if user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


def _call_of(node: Node, made: Mapping[Node, Node]) -> str | None:
    """Return how a number is computed, "" if it is read out of a tensor; None: by a function that
    is not known, or from others than those that tensors are `made` of (one of `tolist()`)."""
    if node.op == "call_method" and node.target == "item":
        return "" if "example_value" in node.all_input_nodes[0].meta else None
    target = round if node.target == "__round__" else node.target
    home, name = getattr(target, "__module__", ""), getattr(target, "__name__", "")
    known = getattr(_HOMES.get(home), name, None) is target and not node.kwargs
    fit = all(one in made if isinstance(one, Node) else type(one) in _PLAIN for one in node.args)
    if not known or not fit:
        return None
    arguments = [None if isinstance(one, Node) else one for one in node.args]
    return json.dumps([home, name, arguments])


def _inserted(node: Node, like: Node) -> Node:
    node.meta.update({key: like.meta[key] for key in _COPIED if key in like.meta})
    return node


@contextlib.contextmanager
def numbers_as_symbols(traced: GraphModule, call: tuple[Any, ...]) -> Iterator[Any]:
    """Derive the joint graph of Dynamo's inside, of the arguments that this gives: if all its
    numbers are those in tensors of theirs, they have symbols. With others it would be derived as if
    none were NaN (0.0 * m is 0): torch refuses them."""
    nodes = traced.graph.find_nodes(op="placeholder")
    numbers = [node for node in traced.graph.nodes if _kind(node) is not None]
    own = all(one.all_input_nodes and one.all_input_nodes[0].target is _NUMBER for one in numbers)
    if not numbers or not own:
        yield call
        return
    leaves, spec = pytree.tree_flatten(call)
    held = (*leaves, *traced.parameters(), *traced.buffers())
    mode = next((one.fake_mode for one in held if isinstance(one, FakeTensor)), None)
    if mode is None:
        fakes = [node.meta.get("example_value") for node in nodes]
        given = zip(fakes, leaves, strict=True)
        yield pytree.tree_unflatten([f if isinstance(f, Tensor) else one for f, one in given], spec)
        return
    before, mode.shape_env = mode.shape_env, numbers[0].meta["example_value"].node.shape_env
    try:
        yield call
    finally:
        mode.shape_env = before


def take_tensors(joint: GraphModule) -> None:
    """Give operators of a joint graph tensors in the place of their numbers, in place.

    Raises:
        RuntimeError: something else than an operator with new results is given a number.
    """
    for node in joint.graph.find_nodes(op="call_function", target=_READ):
        for user in list(node.users):
            found = _taking(user) if node.args[0].target is _NUMBER else None
            if found is None:
                raise RuntimeError(f"{_READ} gives a number to {user.format_node()}")
            user.target = found
            user.args, user.kwargs = pytree.tree_map_only(
                Node, _tensor_of, (user.args, user.kwargs)
            )
        joint.graph.erase_node(node)
    joint.recompile()


def _tensor_of(node: Node) -> Any:
    return node.args[0] if node.target is _READ else node


def _taking(user: Node) -> Any:
    """Return the operator that takes tensors in place of the numbers of a node's; None: there is
    none."""
    overload = user.target
    if not isinstance(overload, OpOverload):
        return None
    schema = schema_of(overload)
    if any(one.alias_info is not None for one in (*schema.arguments, *schema.returns)):
        return None
    given = dict(zip((one.name for one in schema.arguments), user.args, strict=False)) | user.kwargs
    names = [name for name, one in given.items() if isinstance(one, Node) and one.target is _READ]
    nested = pytree.tree_leaves([one for one in given.values() if not isinstance(one, Node)])
    if any(isinstance(one, Node) and one.target is _READ for one in nested):
        return None
    return _taking_tensors(overload, tuple(names))


@functools.cache
def _taking_tensors(overload: Any, names: tuple[str, ...]) -> Any:
    """Define the operator that runs an overload with the numbers in the tensors `names`; once in a
    process."""
    schema = schema_of(overload)
    *_, text = str(schema).partition("(")
    for name in names:
        text = re.sub(rf"[\w?]+ {name}(?=[,)])", f"Tensor {name}", text)
        text = re.sub(rf"[\w?]+ {name}=[^,()]*(?=[,)])", f"Tensor? {name}=None", text)
    places = [one.name in names for one in schema.arguments]

    def with_numbers(read: Callable[[Tensor], Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            given = [
                read(one) if is_number else one
                for one, is_number in zip(args, places, strict=False)
            ]
            named = {key: read(one) if key in names else one for key, one in kwargs.items()}
            return overload(*given, **named)

        return run

    name, _, form = functional_name(overload).rpartition("::")[2].partition(".")
    schema_text = f"{name}.{'_'.join((form or 'default', *names))}({text}"
    kernel, described = with_numbers(Tensor.item), with_numbers(_stand_in)
    return define(schema_text, kernel, described, tuple(overload.tags))


def _stand_in(tensor: Tensor) -> Any:
    """Return a number of the kind that a tensor holds."""
    if tensor.is_floating_point():
        return 1.0
    return True if tensor.dtype is torch.bool else 1
