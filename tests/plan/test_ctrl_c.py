"""Ctrl-C while a solver runs: its best plan so far, and a way out for who insists."""

from __future__ import annotations

import subprocess
import sys
import textwrap

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
        from tests.monet.graphs import training_graph
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
