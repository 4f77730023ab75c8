"""Saving and loading plans. What is loaded is checked as if a strategy had just made it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from memopt.errors import InvalidProgramError, PlanFileError
from memopt.files.envelope import pack, read_plan, write_atomically
from memopt.files.strategy_record import encode_strategy, read_strategy
from memopt.models.chain import Chain
from memopt.models.codec import Reader
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.record import ModelRecord
from memopt.models.record_json import encode_record, read_record
from memopt.models.same_graph import as_captured
from memopt.models.steps import ChainStep
from memopt.plan_record import BaselineFigures, PlanRecord
from memopt.programs.encoding import chain as encode_chain
from memopt.programs.encoding import device as encode_device
from memopt.programs.encoding import graph as encode_graph
from memopt.programs.encoding import program as encode_program
from memopt.programs.encoding import (
    read_chain,
    read_device,
    read_graph,
    read_program,
    read_steps,
)
from memopt.programs.encoding import steps as encode_steps
from memopt.programs.instructions import Program
from memopt.programs.serialize import fingerprint
from memopt.programs.violations import Violation
from memopt.reductions.validate_and_replay import Figures, judge
from memopt.strategies.base import Status

FileName: TypeAlias = str | PathLike[str]

_FIELDS = (
    "status",
    "strategy",
    "budget_bytes",
    "host_budget_bytes",
    "lower_bound_s",
    "figures",
    "baseline",
    "device",
    "graph",
    "chain",
    "program",
    "chain_steps",
    "stats",
    "notes",
    "record",
)
_ROUNDING = 1e-9
_LARGEST_WHOLE = 2**53
"""Larger numbers are no sizes or counts, and other JSON readers would round them."""


def save(plan: PlanRecord, path: FileName) -> None:
    """Write a plan file; see `Plan.save`."""
    write_atomically(Path(path), pack(encode(plan)))


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
    """A plan as what `json` writes."""
    return {
        "status": plan.status.value,
        "strategy": encode_strategy(plan.strategy),
        "budget_bytes": plan.budget,
        "host_budget_bytes": plan.host_budget,
        "lower_bound_s": float(plan.lower_bound_s),
        "figures": {
            "peak_bytes": plan.peak_bytes,
            "step_time_s": float(plan.step_time_s),
            "host_peak_bytes": plan.host_peak_bytes,
        },
        "baseline": {
            "peak_bytes": plan.baseline.peak_bytes,
            "step_time_s": float(plan.baseline.step_time_s),
            "measured": plan.baseline.measured,
        },
        "device": encode_device(plan.device),
        "graph": None if plan.graph is None else encode_graph(plan.graph),
        "chain": None if plan.chain is None else encode_chain(plan.chain),
        "program": None if plan.program is None else encode_program(plan.program),
        "chain_steps": None if plan.chain_steps is None else encode_steps(plan.chain_steps),
        "stats": {str(key): _plain(value) for key, value in plan.stats.items()},
        "notes": list(plan.notes),
        "record": None if plan.record is None else encode_record(plan.record),
    }


def _plain(value: object) -> object:
    """What a solver says about itself, as JSON; texts where JSON has nothing for it."""
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


def decode(reader: Reader) -> PlanRecord:
    """The plan that `encode` wrote, validated and replayed.

    Raises:
        PlanFileError: a field is missing, unknown or wrong, or the plan is not valid.
    """
    _refuse_huge_numbers(reader.value)
    found = dict(zip(_FIELDS, reader.fields(*_FIELDS), strict=True))
    graph = found["graph"].optional(read_graph)
    chain = found["chain"].optional(read_chain)
    program = found["program"].optional(read_program)
    steps = found["chain_steps"].optional(read_steps)
    device = read_device(found["device"])
    budget_bytes = found["budget_bytes"].optional(_read_budget)
    host_bytes = found["host_budget_bytes"].optional(Reader.whole)
    strategy = read_strategy(found["strategy"])
    cost_model = graph if graph is not None else chain
    if cost_model is None or (program if graph is not None else steps) is None:
        raise reader.fail("a graph with its program, or a chain with its steps")
    if graph is None and program is not None:
        raise PlanFileError("plan file: a program without the graph it is of")
    record = found["record"].optional(read_record)
    if record is not None:
        _check_graph(graph, record)
    offloading = strategy.features.offload
    figures = _checked(cost_model, steps, program, (budget_bytes, host_bytes), device, offloading)
    _check_figures(found["figures"], figures)
    if graph is not None and chain is not None and steps is not None:
        # They are shown; the program is what runs.
        _checked(chain, steps, None, (None, None), device)
    peak_bytes, time_s, measured = found["baseline"].fields("peak_bytes", "step_time_s", "measured")
    return PlanRecord(
        status=_read_status(found["status"]),
        strategy=strategy,
        budget=budget_bytes,
        host_budget=host_bytes,
        peak_bytes=figures.peak_bytes,
        resident_bytes=cost_model.resident_bytes,
        step_time_s=figures.time_s,
        lower_bound_s=_read_bound(found["lower_bound_s"], figures),
        baseline=BaselineFigures(_read_bytes(peak_bytes), _read_seconds(time_s), measured.flag()),
        device=device,
        program=program,
        chain_steps=steps,
        graph=graph,
        chain=chain,
        host_peak_bytes=figures.host_peak_bytes,
        compute_time_s=cost_model.compute_time_s,
        stats=_read_stats(found["stats"]),
        notes=found["notes"].each(Reader.text),
        record=record,
    )


def _read_budget(reader: Reader) -> int:
    budget_bytes = reader.whole()
    if budget_bytes < 1:
        raise reader.fail("a budget of at least 1 byte")
    return budget_bytes


def _read_bytes(reader: Reader) -> int:
    size_bytes = reader.whole()
    if size_bytes < 0:
        raise reader.fail("bytes, at least 0")
    return size_bytes


def _read_seconds(reader: Reader) -> float:
    seconds = reader.number()
    if seconds < 0:
        raise reader.fail("seconds, at least 0")
    return seconds


def _read_status(reader: Reader) -> Status:
    status = reader.choice(Status)
    if status not in (Status.OPTIMAL, Status.FEASIBLE):
        raise reader.fail("the status of a plan")
    return status


def _read_bound(reader: Reader, figures: Figures) -> float:
    bound_s = _read_seconds(reader)
    if bound_s > figures.time_s * (1 + _ROUNDING):
        raise reader.fail(f"a lower bound of the step's time, {figures.time_s!r} s,")
    return bound_s


def _check_graph(graph: Graph | None, record: ModelRecord) -> None:
    """The graph must be the one whose fingerprint the record has; `apply` compares that one with
    the model's."""
    try:
        found = "" if graph is None else fingerprint(as_captured(graph, record.resized))
    except ValueError as error:
        raise PlanFileError(f"plan file.record.resized: {error}") from error
    own_bytes = record.loss_bytes + record.library_bytes
    if graph is not None and own_bytes > graph.extra_resident_bytes:
        raise PlanFileError(
            "the file's loss and libraries take more than all that is resident; plan again"
        )
    if found != record.fingerprint or not found:
        raise PlanFileError(
            "the file's graph is not the one that its fingerprint is of: the file was edited; "
            "plan again"
        )


def _refuse_huge_numbers(value: object) -> None:
    """Sizes are added up in machine integers: none may be larger than any real size."""
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            todo.extend(item.values())
        elif isinstance(item, list):
            todo.extend(item)
        elif isinstance(item, int) and abs(item) > _LARGEST_WHOLE:
            raise PlanFileError("plan file: a number is larger than any size or count can be")


def _checked(
    cost_model: Graph | Chain,
    steps: tuple[ChainStep, ...] | None,
    program: Program | None,
    limits: tuple[int | None, int | None],
    device: Device,
    offloading: bool = False,
) -> Figures:
    problem: Violation | Exception | None
    try:
        problem, figures = judge(
            cost_model, steps, program, limits[0], device, limits[1], offloading=offloading
        )
    except (InvalidProgramError, IndexError) as error:
        problem, figures = error, Figures(0, 0.0, 0)
    if problem is not None:
        raise PlanFileError(f"the file holds no valid plan: {problem}")
    return figures


def _check_figures(reader: Reader, figures: Figures) -> None:
    peak_bytes, time_s, host_peak_bytes = reader.fields(
        "peak_bytes", "step_time_s", "host_peak_bytes"
    )
    stored = Figures(peak_bytes.whole(), time_s.number(), host_peak_bytes.whole())
    same_time = math.isclose(stored.time_s, figures.time_s, rel_tol=_ROUNDING)
    if (stored.peak_bytes, stored.host_peak_bytes) != (
        figures.peak_bytes,
        figures.host_peak_bytes,
    ) or not same_time:
        raise PlanFileError(
            f"{reader.place}: the stored figures {stored} are not those of the plan, {figures}; "
            "plan again"
        )


def _read_stats(reader: Reader) -> dict[str, object]:
    return {name: item.value for name, item in reader.entries().items()}
