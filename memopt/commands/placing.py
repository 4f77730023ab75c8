"""`memopt place`: addresses for buffers with known lifetimes (OLLA eq. 15)."""

from __future__ import annotations

from pathlib import Path

from memopt.commands.output import say, say_json
from memopt.errors import InfeasibleBudgetError
from memopt.models.budget import format_bytes
from memopt.strategies.base import Status


def place_command(
    instance: Path,
    capacity: int | None,
    time_limit_s: float | None,
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """See `memopt.cli.place`.

    Raises:
        InfeasibleBudgetError: no placement within `capacity` was found; nothing is written.
    """
    from memopt.strategies.olla.csv_files import read_buffers, write_buffers
    from memopt.strategies.olla.placement import place

    buffers, _ = read_buffers(instance)
    found = place(buffers, capacity, time_limit_s=time_limit_s)
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
