"""Output of the commands: text for people, one JSON object for machines, error messages."""

from __future__ import annotations

import json
import math
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import IntEnum
from pathlib import Path
from typing import Any

import typer

from memopt.commands.targets import TargetError
from memopt.errors import InfeasibleBudgetError, MemoptError, PlanFileError
from memopt.models.device import Device
from memopt.report.plan_numbers import baseline_figures as baseline_figures
from memopt.report.plan_numbers import plan_figures as plan_figures

_WIDEST = 120


class ExitCode(IntEnum):
    """Exit statuses of `memopt`."""

    OK = 0
    FAILED = 1
    USAGE = 2
    """Unknown or missing options and arguments, or an option's value that cannot be used."""
    INFEASIBLE = 3
    """No plan fits the budget, or no placement the capacity; the message names one that does."""
    PLAN_FILE = 4
    """The plan file is damaged, of another version or for another model."""


class OptionError(ValueError):
    """An option's value cannot be used; the message names the option and what it takes."""


@contextmanager
def value_of(option: str) -> Iterator[None]:
    """Blame this option's value for every ValueError inside.

    Raises:
        OptionError: instead of a ValueError.
    """
    try:
        yield
    except ValueError as error:
        raise OptionError(f"{option}: {error}") from error


def say(text: str) -> None:
    """Print a text on standard output."""
    typer.echo(text)


def say_written(*paths: Path | None) -> None:
    """Name the files that were written."""
    for path in paths:
        if path is not None:
            say(f"wrote {path}")


def say_json(value: object) -> None:
    """Print one JSON document on standard output."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


@contextmanager
def failures(as_json: bool) -> Iterator[None]:
    """Turn errors into one message and an exit status."""
    try:
        yield
    except InfeasibleBudgetError as error:
        smallest = error.smallest_budget_bytes
        _fail(error, ExitCode.INFEASIBLE, as_json, smallest_budget_bytes=smallest)
    except PlanFileError as error:
        _fail(error, ExitCode.PLAN_FILE, as_json)
    except OptionError as error:
        _fail(error, ExitCode.USAGE, as_json)
    except (MemoptError, TargetError, ValueError, ImportError, OSError) as error:
        _fail(error, ExitCode.FAILED, as_json)


def _fail(error: Exception, code: ExitCode, as_json: bool, **more: object) -> None:
    if as_json:
        say_json({"error": {"type": type(error).__name__, "message": str(error), **more}})
    else:
        width = min(_WIDEST, shutil.get_terminal_size().columns)
        text = textwrap.fill(
            f"error: {error}", width, break_long_words=False, break_on_hyphens=False
        )
        typer.echo(text, err=True)
    raise typer.Exit(int(code)) from error


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table as wide as the terminal, 80 columns in a pipe."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, title in enumerate(titles):
        drawn.add_column(title, no_wrap=number == 0, overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    Console().print(drawn)


def device_figures(device: Device) -> dict[str, Any]:
    """Return a device's figures for machines; infinite rates as null."""
    found: dict[str, Any] = _finite(asdict(device))
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and math.isinf(value) else value
