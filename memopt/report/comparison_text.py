"""A comparison as text, Markdown, HTML and a data frame."""

from __future__ import annotations

import csv
import io
from html import escape
from typing import TYPE_CHECKING

from memopt.models.budget import format_bytes
from memopt.report.texts import aligned, format_seconds, or_dash

if TYPE_CHECKING:
    from pandas import DataFrame

    from memopt.comparison_record import CellRecord, ComparisonRecord

_HEAD = (
    "strategy",
    "budget",
    "status",
    "peak",
    "step time",
    "overhead",
    "gap",
    "class bound",
    "solve",
)
_MEASURED_HEAD = ("measured peak", "measured time", "measured overhead")


def text(comparison: ComparisonRecord[CellRecord]) -> str:
    """Format aligned columns, the baseline above, notes below."""
    rows = [_head(comparison), *(_row(comparison, cell) for cell in comparison.cells)]
    return "\n".join([*_above(comparison), *aligned(rows), *_notes(comparison)])


def markdown(comparison: ComparisonRecord[CellRecord]) -> str:
    """Format a Markdown table, the baseline above, notes below."""
    head = _head(comparison)
    rows = [head, tuple("---" for _ in head)]
    rows += [_row(comparison, cell) for cell in comparison.cells]
    lines = ["| " + " | ".join(entry.replace("|", "\\|") for entry in row) + " |" for row in rows]
    notes = [f"- {note}" for note in _notes(comparison)]
    above = "  \n".join(_above(comparison))
    return "\n".join([above, "", *lines, *(["", *notes] if notes else [])])


def html(comparison: ComparisonRecord[CellRecord]) -> str:
    """Format an HTML table for notebooks, each budget's fastest plan in bold; no script."""
    bold = _fastest(comparison)
    rows = ["".join(f"<th>{escape(entry)}</th>" for entry in _head(comparison))]
    for cell in comparison.cells:
        style = ' style="font-weight:bold"' if id(cell) in bold else ""
        entries = _row(comparison, cell)
        rows.append("".join(f"<td{style}>{escape(entry)}</td>" for entry in entries))
    paragraphs = "".join(f"<p>{escape(line)}</p>" for line in _above(comparison))
    notes = "".join(f"<p>{escape(note)}</p>" for note in _notes(comparison))
    table = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<div>{paragraphs}<table>{table}</table>{notes}</div>"


def csv_text(comparison: ComparisonRecord[CellRecord], names: tuple[str, ...]) -> str:
    """Format CSV, see `Comparison.to_csv`; `names` are the cells' attributes to write."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for cell in comparison.cells:
        values = (getattr(cell, name) for name in names)
        writer.writerow("" if value is None else str(value) for value in values)
    return text.getvalue()


def data_frame(comparison: ComparisonRecord[CellRecord], names: tuple[str, ...]) -> DataFrame:
    """Make a data frame, see `Comparison.to_dataframe`; `names` are the cells' attributes in it."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError(
            "to_dataframe needs pandas, which is not installed: pip install pandas"
        ) from error
    rows = [{name: getattr(cell, name) for name in names} for cell in comparison.cells]
    # If pyarrow is installed, pandas turns members of a StrEnum into plain strings.
    named = [{**row, "status": str(row["status"].value)} for row in rows]
    frame = pandas.DataFrame(named, columns=list(names))
    whole = [name for name in names if name.endswith("_bytes")]
    # Nullable integers keep bytes whole in columns with empty cells.
    return frame.astype(dict.fromkeys(whole, "Int64"))


def _head(comparison: ComparisonRecord[CellRecord]) -> tuple[str, ...]:
    return _HEAD if comparison.measured_baseline is None else (*_HEAD, *_MEASURED_HEAD)


def _row(comparison: ComparisonRecord[CellRecord], cell: CellRecord) -> tuple[str, ...]:
    peak = or_dash(cell.peak_bytes, format_bytes)
    if cell.plan is None and cell.smallest_budget_bytes is not None:
        peak = f"needs {format_bytes(cell.smallest_budget_bytes)}"
    entries = (
        cell.strategy,
        "no limit" if cell.budget_bytes is None else format_bytes(cell.budget_bytes),
        cell.verdict,
        peak,
        or_dash(cell.step_time_s, format_seconds),
        or_dash(cell.overhead, _share),
        or_dash(cell.gap, lambda gap: f"{gap:.1%}"),
        or_dash(cell.lower_bound_s, format_seconds),
        format_seconds(cell.solve_time_s),
    )
    baseline = comparison.measured_baseline
    if baseline is None:
        return entries
    seconds = cell.measured_time_s
    return (
        *entries,
        or_dash(cell.measured_peak_bytes, format_bytes),
        or_dash(seconds, format_seconds),
        or_dash(seconds, lambda time_s: _share(time_s / baseline.step_time_s - 1)),
    )


def _above(comparison: ComparisonRecord[CellRecord]) -> list[str]:
    base, beside = comparison.baseline, comparison.measured_baseline
    figures = {"measured" if base.measured else "predicted": base}
    if beside is not None:
        figures["measured beside the plans"] = beside
    return [
        f"without memopt ({how}): {format_bytes(one.peak_bytes)}, {format_seconds(one.step_time_s)}"
        for how, one in figures.items()
    ]


def _notes(comparison: ComparisonRecord[CellRecord]) -> list[str]:
    notes = dict.fromkeys(f"{cell.strategy}: {cell.note}" for cell in comparison.cells if cell.note)
    notes |= dict.fromkeys(comparison.left_out)
    if not comparison.complete:
        notes["interrupted: the comparison is not complete"] = None
    return list(notes)


def _fastest(comparison: ComparisonRecord[CellRecord]) -> set[int]:
    """Return the ids of each budget's fastest cells, as predicted."""
    found = set()
    for budget in comparison.budgets:
        row = [
            c for c in comparison.cells if c.budget_bytes == budget and c.step_time_s is not None
        ]
        best = min((c.step_time_s or 0.0 for c in row), default=0.0)
        found |= {id(cell) for cell in row if cell.step_time_s == best}
    return found


def _share(share: float) -> str:
    return f"{share:+.1%}"
