"""What auto tried, and why it tried no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from memopt.models.status import Status
from memopt.report.texts import format_seconds


def searched(
    stats: Mapping[str, object], compute_time_s: float
) -> tuple[str, tuple[tuple[str, ...], ...]]:
    """Return a title and a row for each member that was asked: (name, seconds spent, step time over
    running every operator once or why there is no plan). No rows where it was not auto's search.

    Args:
        stats: the plan's.
        compute_time_s: of every operator once.
    """
    rows = tuple(
        row for key in ("tried", "at_once") for row in _rows(stats.get(key), compute_time_s)
    )
    spent_s = stats.get("solve_s")
    took = f" in {format_seconds(spent_s)}" if isinstance(spent_s, float) else ""
    lines = [f"tried: {len(rows)} of auto's strategies{took}"]
    ended, left = stats.get("ended"), stats.get("not_tried")
    if ended:
        lines.append(f"ended: {ended}")
    if isinstance(left, Sequence) and left and not isinstance(left, str):
        lines.append(f"not tried: {', '.join(map(str, left))}")
    if stats.get("reason"):
        lines.append(str(stats["reason"]))
    return "; ".join(lines), rows


def _rows(lines: object, compute_time_s: float) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a search's outcomes (`MemberOutcome.line`), also as a file has them."""
    if not isinstance(lines, Sequence) or isinstance(lines, str):
        return
    for line in lines:
        match line:
            case [str(name), str(status), float(time_s), float(seconds), str()]:
                over = f"{time_s / compute_time_s - 1:+.1%}" if compute_time_s > 0 else status
                yield name, format_seconds(seconds), over
            case [str(name), str(status), None, float(seconds), str(note)]:
                proved = "no plan: proved" if status == Status.INFEASIBLE else "no plan"
                yield name, format_seconds(seconds), note or proved
