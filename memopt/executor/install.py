"""Makes a program runnable in its captured model."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from memopt.executor.absence import Uncomputed
from memopt.executor.arena import ArenaFamily, Arenas, arena_layout
from memopt.executor.arena_check import CheckedArenas
from memopt.executor.codegen import generate
from memopt.executor.graph_segments import Segments
from memopt.executor.handover import Yielding, in_halves, in_order
from memopt.executor.homes import Homes
from memopt.executor.installed import Installed
from memopt.executor.interpret import interpret
from memopt.executor.partial_backward import Backward, PartialBackward, partial_backward
from memopt.executor.random_state import RandomStates
from memopt.executor.recorder import Recorder
from memopt.executor.swap import ThreadSwap
from memopt.executor.swap_streams import DeviceStreams, StreamSwap
from memopt.executor.values import Halves, Origin
from memopt.programs.instructions import Program
from memopt.step.assumed import nothing_assumed
from memopt.step.backend import backend_of
from memopt.step.build import Lowering
from memopt.step.captured import Captured
from memopt.step.results import held_by


def install(
    captured: Captured,
    lowering: Lowering,
    program: Program,
    *,
    interpreted: bool = False,
    swap: ThreadSwap | StreamSwap | None = None,
    recorder: Recorder | None = None,
    checked: bool = False,
    family: ArenaFamily | None = None,
    homes: Homes | None = None,
    together: Mapping[int, tuple[int, ...]] | None = None,
    between: Iterable[int] | None = None,
) -> Installed:
    """Make a program runnable in its captured model.

    Args:
        captured: the model's joint graph.
        lowering: its Graph and node map; the program's indices refer to it.
        program: a valid program.
        interpreted: run instruction by instruction instead of by generated code.
        swap: makes the host copies; None: streams on a device, else worker threads.
        recorder: records the generated code's steps (`recorder_for`); not interpreted ones.
        checked: the arena's debug mode (`memopt.executor.arena_check`). Interpreted steps have no
            arena: torch's allocator places their tensors.
        homes: the host copies of moved parameters and state (train steps).
        family: programs whose idle arena it may use; None: its own.
        together: position of an update → the positions of those that run with it (train steps).
        between: positions of the instructions that run between CUDA graphs; None: nothing is to be
            captured.
    """
    halves = Halves(captured, lowering, program, together=together or {})
    device = _device(captured)
    mover = _mover(halves, device, recorder) if swap is None else swap
    if homes is not None:
        homes.swap = mover
    random = RandomStates(device)
    segments = None if between is None else Segments(between, random, mover)
    halves = replace(halves, segments=segments)
    arenas = None if interpreted else _arenas(halves, device, checked, family)
    if interpreted:
        forward, backward, source = *interpret(halves, mover, random, homes), ""
    else:
        forward, backward, source = generate(halves, mover, random, recorder, arenas, homes)

    made_with = (mover, random, recorder, arenas)

    def without(absence: Uncomputed) -> tuple[Backward, Yielding | None]:
        part = replace(halves, absence=absence)
        if interpreted:
            return random.settling(interpret(part, mover, random, homes)[1]), None
        _, made, _ = generate(part, *made_with, homes)
        return random.settling(made), in_halves(part, *made_with)

    @functools.cache
    def partial(missing: frozenset[int]) -> PartialBackward | None:
        return partial_backward(captured, lowering, program, missing, without)

    beside = (interpreted or None, arenas, homes, recorder, segments)
    return Installed(
        forward=random.settling(forward),
        backward=random.settling(backward),
        watched=_watched(halves),
        names=tuple(p.name or p.node.name for p in captured.primals),
        source=source,
        watched_outputs=halves.outputs_read_later,
        fork=functools.partial(_forked, halves, mover, arenas),
        handover=None if interpreted else in_order(halves, *made_with),
        partial=partial,
        in_halves=None if interpreted else in_halves(halves, *made_with),
        recomputes=len({run.op for _, run in program.computes}) < len(program.computes),
        by_kernels=frozenset() if segments else _read_by_kernels(captured, lowering, program),
        segments=segments,
        look=captured.check_assumed if captured.assumed else nothing_assumed,
        origin=None if any(x is not None for x in beside) else Origin(halves, mover, random),
    )


def _read_by_kernels(captured: Captured, lowering: Lowering, program: Program) -> frozenset[int]:
    """Return the numbers of the tangents that no implementation of a plan's own reads."""
    chosen = [run for _, run in program.computes if run.implementation is not None]
    nodes = [lowering.node_of(run.op, run.implementation) for run in chosen]
    read = set(held_by((one for node in nodes for one in node.all_input_nodes), lowering.storages))
    return frozenset(
        number
        for number, tangent in enumerate(captured.tangents)
        if read.isdisjoint(lowering.storages[tangent])
    )


def _forked(
    halves: Halves, mover: ThreadSwap | StreamSwap, arenas: Arenas | None, saved: list[Any]
) -> list[Any]:
    """Copy what is saved for a backward that may run again, once all transfers have ended."""
    saved = mover.fork(saved)
    return halves.fork(saved, saved if arenas is None else arenas.fork(saved))


def _watched(halves: Halves) -> tuple[int, ...]:
    captured = halves.captured
    return tuple(
        i
        for i in sorted(halves.backward_primals)
        if i not in captured.mutated
        and isinstance(captured.primals[i].node.meta.get("val"), torch.Tensor)
    )


def _arenas(
    halves: Halves, device: torch.device, checked: bool, family: ArenaFamily | None
) -> Arenas | None:
    layout = arena_layout(halves.lowering, halves.program, device)
    return None if layout is None else (CheckedArenas if checked else Arenas)(layout, family)


def _mover(
    halves: Halves, device: torch.device, recorder: Recorder | None
) -> ThreadSwap | StreamSwap:
    pool_bytes = halves.host_placement.extent_bytes
    if not backend_of(device).on_host and (pool_bytes or halves.moved):
        streams = DeviceStreams(device, recorder, exact=True)
        return StreamSwap(streams, pool_bytes, recorder, device)
    return ThreadSwap(recorder)


def _device(captured: Captured) -> torch.device:
    for primal in captured.primals:
        value = primal.node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return value.device
    return torch.device("cpu")
