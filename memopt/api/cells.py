"""Cells of comparisons on disk, so that an interrupted comparison can be resumed.

A cell's key is a digest of all that it depends on: the cost model, the device, the strategy with
its parameters, the budget, the time limit and memopt's own code. A cell that is read is validated
and replayed, as a plan file is.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from memopt.api.comparison import Cell
from memopt.api.plan import Plan
from memopt.errors import PlanFileError
from memopt.files.envelope import read_bytes, write_atomically
from memopt.files.plan_file import decode, encode
from memopt.files.plan_store import code_digest
from memopt.models import codec
from memopt.models.device import Device
from memopt.models.folders import default_directory, drop_oldest, tell_once
from memopt.models.reader import Reader, canonical, digest, parse
from memopt.plan_record import BaselineFigures
from memopt.reductions.chain_to_graph import ChainGraph
from memopt.strategies import STRATEGIES, Status, Strategy

if TYPE_CHECKING:
    from memopt.reductions.chain_view import ChainView
    from memopt.step.profiled import Profiled

MOST_FILES = 2000
"""The oldest cells beyond this many are dropped."""


@dataclass(frozen=True)
class _Stored:
    """A comparison's cell as it is stored on disk."""

    solve_time_s: float
    status: Status
    smallest_budget_bytes: int | None
    plan: dict[str, object] | None


class CellCache:
    """The cells of one cost model, device and time limit.

    Args:
        view: the cost model, as a graph and as a chain.
        profiled, baseline: attached to every plan that is loaded.
        folder: where the cells are stored; None: MEMOPT_CACHE_DIR or the user's cache folder.
    """

    def __init__(
        self,
        view: ChainView,
        device: Device,
        time_limit_s: float | None,
        profiled: Profiled | None,
        baseline: BaselineFigures,
        folder: Path | None = None,
    ) -> None:
        self._view = view
        self._profiled, self._baseline = profiled, baseline
        self._folder = (folder or default_directory()) / "cells-v1"
        self._encoded = codec.encode(view.chain if view.exact else view.graph)
        whole = [code_digest(), self._encoded, codec.encode(device), repr(time_limit_s)]
        self._key = digest(whole)

    def load(self, strategy: Strategy, label: str, budget: int | str | None) -> Cell | None:
        """Return the stored cell; None if there is none, or it cannot be read."""
        path = self._path(strategy, budget)
        try:
            found = codec.read(_Stored, Reader(parse(read_bytes(path)), "cell"))
            if found.plan is None:
                return Cell(
                    label,
                    budget if isinstance(budget, int) else None,
                    found.status,
                    found.solve_time_s,
                    smallest_budget_bytes=found.smallest_budget_bytes,
                )
            of_chain = self._view.exact and found.plan["program"] is None
            encoded = self._operators if self._view.exact and not of_chain else self._encoded
            whole = {**found.plan, "chain" if of_chain else "graph": encoded}
            made = Plan.of(decode(Reader(whole, "cell")))
            return Cell.of(label, self._as_solved_here(made, strategy), found.solve_time_s)
        except (OSError, PlanFileError):
            return None

    def store(self, strategy: Strategy, budget: int | str | None, cell: Cell) -> None:
        """Store a finished cell, unless a user's own strategy made it: its code may change."""
        finished = cell.plan is not None or cell.status is Status.INFEASIBLE
        if not finished or type(strategy) not in {type(one) for one in STRATEGIES}:
            return
        plan = cell.plan
        value = _Stored(
            cell.solve_time_s,
            cell.status,
            cell.smallest_budget_bytes,
            # All cells share the graph, chain and record: `load` puts them back.
            None
            if plan is None
            else {**encode(plan), "graph": None, "chain": None, "record": None},
        )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path(strategy, budget), canonical(codec.encode(value)))
            drop_oldest(self._folder, MOST_FILES)
        except PlanFileError:
            # The plan holds a value that a file cannot hold.
            return
        except OSError as error:
            tell_once("finished comparisons in", self._folder, "written", error)

    def _path(self, strategy: Strategy, budget: int | str | None) -> Path:
        parts = [self._key, type(strategy).__name__, repr(strategy), repr(budget)]
        return self._folder / f"{digest(parts)}.json"

    @functools.cached_property
    def _operators(self) -> object:
        """The graph of a bare chain's operators, encoded."""
        assert isinstance(self._view, ChainGraph)
        return codec.encode(self._view.operators)

    def _as_solved_here(self, plan: Plan, strategy: Strategy) -> Plan:
        """Return a loaded plan as a solve of this comparison would have made it."""
        view, graph, on_chain = self._view, self._view.graph, strategy.needs == "chain"
        if isinstance(view, ChainGraph):
            on_chain = plan.is_of_chain
            graph = view.graph if on_chain else view.operators
        return replace(
            plan,
            strategy=strategy,
            graph=graph,
            chain=view.chain if on_chain else None,
            baseline=self._baseline,
            profiled=self._profiled,
            record=None if self._profiled is None else self._profiled.record,
        )
