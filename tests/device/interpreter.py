"""An interpreter for the tests of this folder, beside that of the test run.

A process that has loaded the accelerator has it in all its tests, and one whose host touches device
memory dies. So the test run collects these tests, and has each of them run by a child, which is
told the test's id and sends back its reports. Groups of `--dist loadgroup`, selections and time
limits are as for other tests; a child that dies fails the test that it ran, and the next one gets
another child.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

import pytest

CHILD = "MEMOPT_DEVICE_TESTS"
HERE = Path(__file__).parent


OWN_ID = pytest.StashKey[str]()
"""A test's id, before xdist appends its group."""


class Interpreter:
    """A child that runs tests of this folder."""

    def __init__(self, config: pytest.Config) -> None:
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # `end` closes it
        asked, ask = os.pipe()
        told, tell = os.pipe()
        options = ["-q", "-p", "no:cacheprovider", f"--rootdir={config.rootpath}"]
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "pytest", str(HERE), *options],
            cwd=config.rootpath,
            env={**kept, CHILD: f"{asked},{tell}"},
            pass_fds=(asked, tell),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        os.close(asked)
        os.close(tell)
        self._ask, self._told = os.fdopen(ask, "w"), os.fdopen(told)

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[dict[str, Any]] | None:
        """The reports of one test; None: the child died."""
        try:
            names = [one and one.stash[OWN_ID] for one in (item, nextitem)]
            print(json.dumps(names), file=self._ask, flush=True)
        except BrokenPipeError:
            return None
        line = self._told.readline()
        reports: list[dict[str, Any]] | None = json.loads(line) if line else None
        return reports

    def end(self) -> str:
        """End the child; how it ended, and the last that it printed."""
        self._ask.close()
        self._told.close()
        try:
            self._child.wait(30)
        except subprocess.TimeoutExpired:
            self._child.kill()
        code = self._child.wait()
        self._output.seek(0)
        printed = self._output.read().decode(errors="replace")[-8000:]
        self._output.close()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"the interpreter that ran it ended with {how}; it had printed:\n{printed}"

    def kill(self) -> str:
        """End a child that hangs."""
        self._child.kill()
        return self.end()


def serve(session: pytest.Session) -> None:
    """Run what the parent asks for, until it asks no more (in the child)."""
    asked, tell = map(int, os.environ[CHILD].split(","))
    config = session.config
    items: dict[str | None, pytest.Item] = {item.nodeid: item for item in session.items}
    reports: list[Any] = []

    class Collector:
        @pytest.hookimpl
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            reports.append(config.hook.pytest_report_to_serializable(config=config, report=report))

    config.pluginmanager.register(Collector())
    with os.fdopen(asked) as questions, os.fdopen(tell, "w") as answers:
        for line in questions:
            name, following = json.loads(line)
            config.hook.pytest_runtest_protocol(item=items[name], nextitem=items.get(following))
            print(json.dumps(reports), file=answers, flush=True)
            reports.clear()
