"""Every fault of the table, injected."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.fault import Fault, Room
from tests.faults.table import every_fault

ROWS = every_fault()


def row(one: Fault) -> str:
    return one.name


@pytest.fixture(autouse=True)
def _uncollected() -> Iterator[None]:
    """No garbage collector: what is in a cycle counts as leaked."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("fault", [one for one in ROWS if not one.slow], ids=row)
def test_fault(fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fault.inject(Room(tmp_path, monkeypatch, everywhere=False)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", ROWS, ids=row)
def test_fault_everywhere(fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened = fault.inject(Room(tmp_path, monkeypatch, everywhere=True))
    assert happened > 0
    print(f"{fault.part.name}: {fault.name}: {happened}")
