"""Tests on the fake accelerator; see `interpreter.py` for where they run."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from tests.device import accelerator
from tests.device.accelerator.build import compiler
from tests.device.interpreter import CHILD, HERE, OWN_ID, Interpreter

_interpreter: Interpreter | None = None


@pytest.hookimpl(tryfirst=True)  # before xdist's, which reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip where there is no compiler; a module's tests stay on one worker."""
    own = [item for item in items if item.path.is_relative_to(HERE)]
    for item in own:
        item.stash[OWN_ID] = item.nodeid
        item.add_marker(pytest.mark.xdist_group(f"{HERE.name}-{item.path.stem}"))
        if CHILD not in os.environ:
            item.add_marker(pytest.mark.timeout(900))  # twice the child's, and the build
        if compiler() is None:
            item.add_marker(pytest.mark.skip(reason="no C++ compiler (g++) to build the device"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Have a test of this folder run by the child."""
    global _interpreter
    if CHILD in os.environ or not item.path.is_relative_to(HERE) or compiler() is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    if _interpreter is None:
        _interpreter = Interpreter(item.config)
    follows = nextitem if nextitem is not None and nextitem.path.is_relative_to(HERE) else None
    try:
        found = _interpreter.run(item, follows)
        ended = "" if found is not None else _interpreter.end()
    except BaseException as error:  # the time limit, or Ctrl-C
        ended, found = f"{error!r}; {_interpreter.kill()}", None
        if isinstance(error, KeyboardInterrupt):
            _interpreter = None
            raise
    if found is None:
        _interpreter = None
        reports = [_failure(item, ended)]
    else:
        restore = item.config.hook.pytest_report_from_serializable
        reports = [restore(config=item.config, data=data) for data in found]
    for report in reports:
        report.nodeid = item.nodeid
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _failure(item: pytest.Item, why: str) -> pytest.TestReport:
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """In the child: run what the parent asks for."""
    if "," not in os.environ.get(CHILD, "") or session.config.option.collectonly:
        return None
    from tests.device.interpreter import serve

    serve(session)
    return True


def pytest_sessionfinish() -> None:
    global _interpreter
    if _interpreter is not None:
        _interpreter.end()
        _interpreter = None


@pytest.fixture
def device() -> torch.device:
    """The first of the two devices; `torch.device("fake:1")` is the other one."""
    assert accelerator.mod.device_count() == 2  # loads it
    return torch.device("fake:0")


@pytest.fixture(autouse=True)
def _device_as_new() -> Iterator[None]:
    """Nothing that a test sets on the device stays."""
    torch.set_num_threads(1)
    yield
    accelerator.delay(0)
    accelerator.poison(True)
    accelerator.fail_in(0, 0)
    accelerator.mod.set_device(0)
    for index in range(2):
        accelerator.limit(index, 0)
        torch.accelerator.set_stream(accelerator.mod.default_stream(index))
    gc.collect()
    for index in (1, 0):
        accelerator.mod.set_device(index)
        accelerator.mod.synchronize(index)
        torch.accelerator.empty_cache()  # where it is full the next test's host would wait
