"""Ctrl-C while a solver runs: its best plan so far, and a way out for who insists."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from random import Random

import pytest

import memopt
from memopt.strategies.base import Progress
from tests.strategies.monet.graphs import training_graph

HEAD = """
import signal
from memopt.report.progress import ending_at_ctrl_c
"""


def run(script: str) -> str:
    """What a process prints, which has the signal to itself."""
    command = [sys.executable, "-c", HEAD + textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_reports_raise_after_the_signal_and_the_usual_handler_comes_back() -> None:
    found = run("""
        reports = []
        with ending_at_ctrl_c(lambda fraction, what: reports.append(what)) as told:
            told(0.1, "before")
            signal.raise_signal(signal.SIGINT)
            print("goes on")
            for _ in range(2):
                try:
                    told(0.2, "after")
                except KeyboardInterrupt:
                    print("raised")
        print(reports, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    """)
    assert found.splitlines() == ["goes on", "raised", "raised", "['before'] True"]


def test_a_second_signal_raises_at_once() -> None:
    found = run("""
        try:
            with ending_at_ctrl_c(lambda fraction, what: None):
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
                print("not here")
        except KeyboardInterrupt:
            print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    """)
    assert found == "True\n"


def test_others_handlers_are_left_alone() -> None:
    found = run("""
        signal.signal(signal.SIGINT, lambda *_: print("theirs"))
        with ending_at_ctrl_c(lambda fraction, what: None) as told:
            signal.raise_signal(signal.SIGINT)
            told(0.5, "no interrupt")
    """)
    assert found == "theirs\n"


def test_a_plan_that_is_interrupted_is_a_plan() -> None:
    found = run("""
        import os
        from random import Random
        import memopt
        from tests.strategies.monet.graphs import training_graph
        from memopt.strategies.monet.strategy import Monet
        seen = []
        def interrupting(fraction, what):
            seen.append(what)
            if len(seen) == 1:
                signal.raise_signal(signal.SIGINT)
        graph = training_graph(Random(3), 20, False)
        monet = Monet(max_operators=12)
        plan = memopt.plan(graph, budget=0.9, strategy=monet, progress=interrupting)
        print(plan.program is not None, plan.lower_bound_s <= plan.step_time_s, len(seen))
    """)
    assert found == "True True 1\n"


GRAPH = training_graph(Random(3), 20, False)
RECOMPUTING = ("sequential", "revolve", "rotor", "rotor-optimal", "rotor-free", "rotor-menus")
NAMES = [*RECOMPUTING, "monet", "checkmate", "checkmate-rounding", "auto"]


def interrupting(after: int) -> Progress:
    """A caller who stops at a report, and from then on."""
    reports = []

    def report(fraction: float, what: str) -> None:
        reports.append(what)
        if len(reports) >= after:
            raise KeyboardInterrupt

    return report


@pytest.mark.parametrize("after", [1, 2, 5])
@pytest.mark.parametrize("name", NAMES)
def test_whoever_is_interrupted_has_a_plan(name: str, after: int) -> None:
    for budget in ("min", 0.8):
        made = memopt.plan(GRAPH, budget=budget, strategy=name, progress=interrupting(after))
        assert made.budget is not None
        assert made.peak_bytes <= made.budget


@pytest.mark.parametrize("after", [1, 2, 5])
@pytest.mark.parametrize("name", ["offload-graph", "greedy", "dynprog", "vdnn", "tflms"])
def test_whoever_moves_data_has_a_plan(name: str, after: int) -> None:
    link = memopt.Device(to_host_bytes_per_s=5.0)
    for budget in ("min", 0.95):
        made = memopt.plan(
            GRAPH, budget=budget, strategy=name, device=link, progress=interrupting(after)
        )
        assert made.budget is not None
        assert made.peak_bytes <= made.budget


def test_a_signal_ends_the_rounding_with_a_plan() -> None:
    found = run("""
        from random import Random
        import memopt
        from tests.strategies.monet.graphs import training_graph
        graph = training_graph(Random(3), 20, False)
        told = []
        def once(fraction, what):
            told.append(what)
            if len(told) == 1:
                signal.raise_signal(signal.SIGINT)
        plan = memopt.plan(graph, budget=0.8, strategy="checkmate-rounding", progress=once)
        print(plan.program is not None, len(told))
    """)
    assert found == "True 1\n"
