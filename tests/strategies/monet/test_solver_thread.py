"""Waiting for a solver in a thread: its answer, its error, the caller's interrupt."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from memopt.solvers.running import call_in_thread


def interrupt(fraction: float, what: str) -> None:
    """A caller who stops at the first report."""
    raise KeyboardInterrupt


def test_it_gives_the_answer_and_tells_meanwhile() -> None:
    told: list[str] = []
    enough = threading.Event()

    def progress(fraction: float, what: str) -> None:
        told.append(what)
        enough.set()

    assert call_in_thread(lambda: enough.wait(60.0), progress, lambda: "solving") is True
    assert told[0] == "solving"
    assert call_in_thread(lambda: 7, None, lambda: "") == 7


def test_an_interrupt_stops_a_call_that_can_be_stopped() -> None:
    stopped = threading.Event()

    def call() -> str:
        assert stopped.wait(60.0)
        return "the best so far"

    assert call_in_thread(call, interrupt, lambda: "", stop=stopped.set) == "the best so far"


def test_a_call_that_cannot_be_stopped_is_left_to_itself() -> None:
    over = threading.Event()
    assert call_in_thread(lambda: over.wait(60.0), interrupt, lambda: "") is None
    # It keeps no clock of its own: its limit is past, and so is the time of grace.
    assert call_in_thread(lambda: over.wait(60.0), None, lambda: "", limit_s=-10.0) is None
    over.set()


def test_errors_come_through() -> None:
    def call() -> None:
        raise ValueError("no such parameter")

    with pytest.raises(ValueError, match="no such parameter"):
        call_in_thread(call, None, lambda: "", limit_s=5.0)


def test_ctrl_c_ends_a_search_with_what_it_has() -> None:
    """Without a progress that takes it, too."""
    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    stopped = threading.Event()
    assert call_in_thread(lambda: stopped.wait(60.0), None, lambda: "", stop=stopped.set)


def test_ctrl_c_is_still_pythons_after_cp_sat() -> None:
    """CP-SAT's own handler would leave the signal's default: the process would end at once."""
    script = """
        import signal
        from memopt.models.chain import Chain, Stage
        from memopt.models.device import Device
        from memopt.strategies.offload import OffloadExact
        chain = Chain(4, [Stage(1.0, 1.0, 4, 4, 4) for _ in range(4)])
        plan = OffloadExact().solve(chain, 21, device=Device(to_host_bytes_per_s=4.0))
        print(plan.stats["proved"])
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            print("interrupted")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "interrupted"]
