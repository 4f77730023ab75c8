"""Generates straight-line Python for a program: one function per half of the step.

The source reads like the model: one line per kernel or view, `del` where the plan frees. It is
what runs; `memopt.executor.interpret` is the oracle it is tested against.
"""

from __future__ import annotations

import functools
import itertools
import linecache
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch

from memopt.executor.arena import Arenas
from memopt.executor.arena_check import CheckedArenas
from memopt.executor.arena_code import ArenaWriter
from memopt.executor.code_writer import UnderWay, Writer
from memopt.executor.direct_calls import all_plain
from memopt.executor.homes import Homes
from memopt.executor.recorder import Recorder
from memopt.executor.values import Halves
from memopt.step.results import held_by

_COUNTER = itertools.count()

Parts: TypeAlias = Mapping[int, tuple[int, ...]]
"""Position of an instruction → positions of the gradients that are complete after it."""


def _crossing(halves: Halves, arena: ArenaWriter | None) -> list[str]:
    """Return the variables that the backward needs beside tensors on the device."""
    names = [f"host_{t}" for t in halves.hosted_at_boundary]
    names += [f"state_{op}" for op in halves.saved_states]
    names += ["lease"] if halves.swaps_out_late else []
    return names if arena is None else [*names, "arena"]


def _forward(
    halves: Halves, names: dict[Any, str], globals_: dict[str, Any], arena: ArenaWriter | None,
    direct: bool,
) -> Writer:  # fmt: skip
    writer = Writer(halves, names, globals_, direct)
    writer.arena = arena
    writer.primals()
    writer.resume()
    if halves.host_placement.offsets:
        writer.emit("lease = swap.lease()", above=True)
    if arena is not None:
        arena.begin(writer)
    for position, instruction in enumerate(halves.forward):
        writer.recorded(position, instruction)
    outputs = [writer.argument(o) for o in halves.captured.forward_outputs]
    saved = [writer.value(halves.lowering.bases[t]) for t in halves.saved]
    saved += _crossing(halves, arena)
    writer.emit(f"return [{', '.join(outputs)}], [{', '.join(saved)}]", above=True)
    return writer


def _backward(
    forward: Writer, names: dict[Any, str], globals_: dict[str, Any], in_parts: Parts | None
) -> Writer:
    halves = forward.halves
    writer = Writer(halves, names, globals_, forward.direct)
    writer.arena = forward.arena
    writer.swapping_out = set(forward.swapping_out)
    writer.swapping_in = set(forward.swapping_in)
    writer.sending = UnderWay(halves.lowering, forward.sending)
    writer.laid_out = set(forward.laid_out)
    writer.ran = {run.op for i, run in halves.program.computes if i < halves.boundary}
    writer.primals()
    writer.unpack([None, *halves.captured.tangents], "arguments")
    writer.emit("del _", above=True)
    writer.emit("arguments.clear()", above=True)
    targets = [writer.bind(halves.lowering.bases[t]) for t in halves.saved]
    targets += _crossing(halves, forward.arena)
    if targets:
        writer.emit(f"{', '.join(targets)}, = saved", above=True)
    writer.emit("saved.clear()", above=True)
    if forward.arena is not None:
        forward.arena.take(writer)
    complete = in_parts or {}
    for position, instruction in enumerate(halves.backward, halves.boundary + 1):
        writer.recorded(position, instruction)
        if position in complete:
            _hand_over(writer, complete[position])
    if in_parts is not None:
        given = {i for positions in complete.values() for i in positions}
        _hand_over(writer, [i for i in range(len(halves.captured.gradients)) if i not in given])
        return writer
    results = (*halves.gradients, *halves.captured.other_results)
    gradients = [writer.argument(g) for g in results]
    writer.emit(f"return ({', '.join(gradients)},)" if gradients else "return ()", above=True)
    return writer


def _hand_over(writer: Writer, positions: Iterable[int]) -> None:
    """Yield gradients to autograd, and drop all variables that hold them."""
    gradients = writer.halves.gradients
    pairs = [(i, gradients[i]) for i in positions if gradients[i] is not None]
    given = "".join(f"({i}, {writer.argument(gradient)}), " for i, gradient in pairs)
    writer.emit(f"yield ({given})", above=True)
    for tensor in held_by((gradient for _, gradient in pairs), writer.lowering.storages):
        nodes = [n for n in writer.variables.pop(tensor, []) if n in writer.bound]
        writer.bound.difference_update(nodes)
        if nodes:
            writer.emit(f"del {', '.join(dict.fromkeys(n.name for n in nodes))}")


def generate(
    halves: Halves,
    swap: Any,
    random: Any,
    recorder: Recorder | None = None,
    arenas: Arenas | None = None,
    homes: Homes | None = None,
    in_parts: Parts | None = None,
) -> tuple[Any, Any, str]:
    """Compile a program to two Python functions.

    Args:
        halves: the program with its captured model.
        swap: object with lease/out/bring/wait (see `memopt.executor.swap`).
        random: object with lock/save/replay (see `memopt.executor.random_state`).
        recorder: told when every instruction begins and ends; None: nothing is recorded.
        homes: the host copies of moved parameters and state; None: nothing of them moves.
        arenas: where placed tensors are written; None: wherever torch's allocator puts them.
        in_parts: where the backward yields which gradients, as `memopt.executor.handover.Handed`,
            the others at its end; None: it returns all.

    Returns:
        (forward, backward, source): `forward(primals) -> (outputs, saved)`;
        `backward(primals, arguments, saved) -> gradients`, where `arguments` is the token and
        the tangents, emptied at once, and so is `saved`.
    """

    @functools.cache
    def made(direct: bool) -> tuple[Any, Any, str]:
        source, globals_ = written(halves, swap, random, recorder, arenas, homes, in_parts, direct)
        compiled(source, globals_)
        return globals_["forward"], globals_["backward"], source

    # With the same variables across the boundary, so that one half can follow the other's.
    return *either(made(True)[:2], lambda: made(False)[:2]), made(True)[2]


def either(direct: tuple[Any, Any], otherwise: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the two functions of a program, which run those for plain tensors where they can."""

    def planned_forward(primals: list[Any]) -> Any:
        run = direct[0] if all_plain(primals) else otherwise()[0]
        return run(primals)

    def planned_backward(primals: list[Any], arguments: list[Any], saved: list[Any]) -> Any:
        run = direct[1] if all_plain(primals, arguments, saved) else otherwise()[1]
        return run(primals, arguments, saved)

    return planned_forward, planned_backward


def written(
    halves: Halves,
    swap: Any,
    random: Any,
    recorder: Recorder | None = None,
    arenas: Arenas | None = None,
    homes: Homes | None = None,
    in_parts: Parts | None = None,
    direct: bool = True,
) -> tuple[str, dict[str, Any]]:
    """Return the source of a program's two functions, and what it reads by name; see `generate`.
    `direct`: for plain tensors with nobody looking on."""
    globals_: dict[str, Any] = {"swap": swap, "random": random, "torch": torch, "homes": homes}
    globals_["segments"] = halves.segments
    if recorder is not None:
        globals_["record"] = recorder
    names: dict[Any, str] = {}
    arena = None
    if arenas is not None:
        globals_["arenas"] = arenas
        arena = ArenaWriter(arenas, isinstance(arenas, CheckedArenas))
    forward = _forward(halves, names, globals_, arena, direct)
    backward = _backward(forward, names, globals_, in_parts)
    source = "\n".join(
        [
            "def forward(primals):",
            *forward.lines,
            "",
            "",
            "def backward(primals, arguments, saved):",
            *backward.lines,
            "",
        ]
    )
    return source, globals_


def compiled(source: str, globals_: dict[str, Any]) -> None:
    """Define the two functions of a source among what it reads by name."""
    filename = f"<memopt plan {next(_COUNTER)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    # The source is written above from the captured graph; no file content reaches it.
    exec(compile(source, filename, "exec"), globals_)
