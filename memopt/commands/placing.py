"""`memopt place`: addresses for buffers with known lifetimes (OLLA eq. 15)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memopt.commands import options
from memopt.commands.output import say, say_json
from memopt.errors import InfeasibleBudgetError
from memopt.models.budget import format_bytes
from memopt.models.status import Status


def place(
    instance: Annotated[Path, typer.Argument(help="CSV with id, lower, upper, size.")],
    capacity: Annotated[
        int | None, typer.Option(min=0, help="What it must fit into, bytes.")
    ] = None,
    time_limit: options.TimeLimit = None,
    out: Annotated[Path | None, typer.Option(help="Write the CSV with offsets here.")] = None,
    as_json: options.Json = False,
) -> None:
    """Give buffers with known lifetimes addresses in as little memory as possible."""
    options.check_outputs({"--out": out}, read=instance)
    from memopt.passes.place.csv_files import read_buffers, write_buffers
    from memopt.passes.place.placement import place as place_buffers

    buffers, _ = read_buffers(instance)
    found = place_buffers(buffers, capacity, time_limit_s=time_limit)
    if capacity is not None and found.peak > capacity:
        proof = "there is none" if found.status is Status.INFEASIBLE else "none was found in time"
        raise InfeasibleBudgetError(
            f"no placement within {capacity} bytes: {proof}; at least {found.bound} bytes are "
            f"needed, {found.peak} are enough (--capacity {found.peak})",
            capacity,
            found.peak,
        )
    if out is not None:
        write_buffers(out, buffers, found.offsets)
    if as_json:
        say_json(
            {
                "buffers": len(buffers),
                "peak_bytes": found.peak,
                "bound_bytes": found.bound,
                "gap": found.gap,
                "status": found.status.value,
                "offsets": found.offsets,
            }
        )
        return
    say(
        f"{len(buffers)} buffers, {found.status.value}: peak {found.peak} bytes "
        f"({format_bytes(found.peak)}), bound {found.bound}, gap {found.gap:.2%}"
    )
    if out is not None:
        say(f"wrote {out}")
