"""Saving and loading plans. A loaded plan is checked as if a strategy had just made it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from memopt.errors import InvalidProgramError, PlanFileError
from memopt.files.envelope import pack, read_plan, unpack, write_atomically
from memopt.files.strategy_record import StrategyRecord
from memopt.models import codec
from memopt.models.budget import NO_LIMIT, Budget
from memopt.models.chain import Chain
from memopt.models.codec import NAME, SPARSE, Check, Codec, Seconds
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.reader import Reader
from memopt.models.record import ModelRecord
from memopt.models.same_graph import as_captured
from memopt.models.stage_record import StageRecord
from memopt.models.status import Status
from memopt.models.steps import ChainStep, Steps
from memopt.plan_record import BaselineFigures, PlanRecord
from memopt.programs.instructions import Program
from memopt.programs.moved import resident_bytes_under
from memopt.programs.serialize import fingerprint
from memopt.programs.violations import Violation
from memopt.reductions.chain_to_graph import chain_to_graph
from memopt.reductions.validate_and_replay import Figures, validate_and_replay

FileName: TypeAlias = str | PathLike[str]

_ROUNDING = 1e-9
_LARGEST_WHOLE = 2**53
"""No size or count is larger, and other JSON readers would round larger numbers."""

_Budget: TypeAlias = Annotated[int, Check("a budget of at least 1 byte", lambda size: size >= 1)]
_PlanStatus: TypeAlias = Annotated[
    Status,
    Check("the status of a plan", lambda status: status in (Status.OPTIMAL, Status.FEASIBLE)),
]


def _plain(value: object) -> object:
    """Convert a solver's statistics to JSON; values that JSON lacks become text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int) and abs(value) < _LARGEST_WHOLE:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value)


_Stats: TypeAlias = Annotated[
    Mapping[str, object],
    Codec(_plain, lambda reader: {name: item.value for name, item in reader.entries().items()}),
]


@dataclass(frozen=True)
class _Content:
    """The content of a plan file: fields of a PlanRecord, and the figures."""

    status: _PlanStatus
    strategy: StrategyRecord
    budget: _Budget | None = field(metadata={NAME: "budget_bytes"})
    host_budget: int | None = field(metadata={NAME: "host_budget_bytes"})
    lower_bound_s: Seconds
    figures: Figures
    baseline: BaselineFigures
    device: Device
    graph: Graph | None
    chain: Chain | None
    program: Program | None
    chain_steps: Steps | None
    stats: _Stats
    notes: tuple[str, ...]
    record: ModelRecord | None
    stages: tuple[StageRecord, ...] = field(default=(), metadata=SPARSE)
    allocated_budget_bytes: _Budget | None = field(default=None, metadata=SPARSE)


_SHARED = tuple(one.name for one in fields(_Content) if one.name != "figures")


def save(plan: PlanRecord, path: FileName) -> None:
    """Write a plan file; see `Plan.save`."""
    write_atomically(Path(path), to_bytes(plan))


def to_bytes(plan: PlanRecord) -> bytes:
    """Return the bytes of a plan's file."""
    return pack(encode(plan))


def from_bytes(data: bytes) -> PlanRecord:
    """Return the plan that `to_bytes` wrote; raises as `load`."""
    return decode(unpack(data))


def load(path: FileName) -> PlanRecord:
    """Read a plan that `plan.save(path)` wrote.

    The plan is validated and replayed again. `apply(model)` captures the model and refuses it
    unless its graph is the planned one.

    Raises:
        PlanFileError: the file cannot be read, is damaged, of another version, or holds no
            valid plan; the message says which.
    """
    return decode(read_plan(Path(path)))


def encode(plan: PlanRecord) -> dict[str, Any]:
    """Convert a plan to plain JSON values."""
    figures = Figures(plan.peak_bytes, plan.step_time_s, plan.host_peak_bytes)
    shared = {name: getattr(plan, name) for name in _SHARED}
    if plan.is_of_chain:
        shared |= {"graph": None, "program": None}
    found: dict[str, Any] = codec.encode(_Content(**shared, figures=figures))
    return found


def decode(reader: Reader) -> PlanRecord:
    """Read the plan that `encode` wrote, validate and replay it.

    Raises:
        PlanFileError: a field is missing, unknown or wrong, or the plan is not valid.
    """
    _refuse_huge_numbers(reader.value)
    found = codec.read(_Content, reader)
    graph, program = _planned(reader, found)
    if found.record is not None:
        _check_graph(found.graph, found.record)
    figures = _checked(graph, program, Budget(found.budget, found.host_budget), found.device)
    _check_figures(reader, found, figures)
    if found.graph is not None and found.chain is not None and found.chain_steps is not None:
        # The chain's steps are only shown, but must be valid, too; the program runs.
        _checked(*_of_chain(found.chain, found.chain_steps), NO_LIMIT, found.device)
    shared = {name: getattr(found, name) for name in _SHARED if name not in ("graph", "program")}
    return PlanRecord(
        **shared,
        graph=graph,
        program=program,
        is_of_chain=found.graph is None,
        peak_bytes=figures.peak_bytes,
        resident_bytes=resident_bytes_under(graph, program),
        step_time_s=figures.time_s,
        host_peak_bytes=figures.host_peak_bytes,
        compute_time_s=graph.compute_time_s,
    )


def _planned(reader: Reader, found: _Content) -> tuple[Graph, Program]:
    """Return the plan's graph and its program."""
    if found.graph is not None and found.program is not None:
        return found.graph, found.program
    if found.graph is not None or found.chain is None or found.chain_steps is None:
        raise reader.fail("a graph with its program, or a chain with its steps")
    if found.program is not None:
        raise PlanFileError("plan file: a program without the graph it is of")
    return _of_chain(found.chain, found.chain_steps, found.budget)


def _of_chain(
    chain: Chain, steps: tuple[ChainStep, ...], budget_bytes: int | None = None
) -> tuple[Graph, Program]:
    """Return a chain's graph and the program of its schedule."""
    try:
        view = chain_to_graph(chain)
        return view.graph, view.lower(steps, budget_bytes)
    except (InvalidProgramError, ValueError) as error:
        raise PlanFileError(f"the file holds no valid plan: {error}") from error


def _check_graph(graph: Graph | None, record: ModelRecord) -> None:
    """Check that the graph has the record's fingerprint, which `apply` compares with the model's,
    and that the record's sizes fit into the resident bytes."""
    try:
        found = "" if graph is None else fingerprint(as_captured(graph, record.resized))
    except ValueError as error:
        raise PlanFileError(f"plan file.record.resized: {error}") from error
    own_bytes = record.loss_bytes + record.library_bytes
    own_bytes += record.accumulated_bytes + record.look_bytes
    if graph is not None and own_bytes > graph.extra_resident_bytes:
        raise PlanFileError(
            "the file's loss, libraries and gradients take more than is resident; plan again"
        )
    if found != record.fingerprint or not found:
        raise PlanFileError(
            "the file's graph is not the one that its fingerprint is of: the file was edited; "
            "plan again"
        )


def _refuse_huge_numbers(value: object) -> None:
    """Refuse numbers larger than any real size: sizes are added up in machine integers."""
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            todo.extend(item.values())
        elif isinstance(item, list):
            todo.extend(item)
        elif isinstance(item, int) and abs(item) > _LARGEST_WHOLE:
            raise PlanFileError("plan file: a number is larger than any size or count can be")


def _checked(graph: Graph, program: Program, budget: Budget, device: Device) -> Figures:
    problem: Violation | Exception | None
    try:
        problem, figures = validate_and_replay(graph, program, budget, device)
    except (InvalidProgramError, IndexError) as error:
        problem, figures = error, Figures(0, 0.0, 0)
    if problem is not None:
        raise PlanFileError(f"the file holds no valid plan: {problem}")
    return figures


def _check_figures(reader: Reader, found: _Content, figures: Figures) -> None:
    """Check that the stored figures are the plan's own, and its bound not above its time."""
    stored = found.figures
    same_time = math.isclose(stored.time_s, figures.time_s, rel_tol=_ROUNDING)
    if not same_time or replace(stored, time_s=figures.time_s) != figures:
        raise PlanFileError(
            f"{reader.place}.figures: the stored figures {stored} are not those of the plan, "
            f"{figures}; plan again"
        )
    if found.lower_bound_s > figures.time_s * (1 + _ROUNDING):
        bound = Reader(found.lower_bound_s, f"{reader.place}.lower_bound_s")
        raise bound.fail(f"a lower bound of the step's time, {figures.time_s!r} s,")
