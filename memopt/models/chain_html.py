"""HTML of a chain for notebooks: its totals, and its stages in a table. Everything is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from memopt.models.budget import format_bytes

_SHOWN = 60
_HEAD = ("stage", "name", "forward, s", "backward, s", "output", "saved", "gradient")


def chain_html(chain: Any) -> str:
    """Render a `memopt.models.chain.Chain`; of a long one the first stages and how many more."""
    saved = sum(stage.saved_bytes for stage in chain.stages)
    totals = [
        ("resident", format_bytes(chain.resident_bytes)),
        ("input", format_bytes(chain.input_bytes)),
        ("saved, all stages", format_bytes(saved)),
        ("every stage once", f"{chain.compute_time_s:.4g} s"),
    ]
    rows: list[tuple[str, ...]] = [
        (
            str(number),
            stage.name,
            f"{stage.forward_time_s:.4g}",
            f"{stage.backward_time_s:.4g}",
            format_bytes(stage.output_bytes),
            format_bytes(stage.saved_bytes),
            format_bytes(stage.gradient_bytes),
        )
        for number, stage in enumerate(chain.stages[:_SHOWN], 1)
    ]
    if len(chain.stages) > _SHOWN:
        rows.append(("...", f"{len(chain.stages) - _SHOWN} more", *[""] * 5))
    return "\n".join(
        [
            "<div>",
            f"<b>memopt chain</b> of {len(chain.stages)} stages, the loss last",
            html_table(totals),
            f"<details><summary>stages</summary>{html_table(rows, _HEAD)}</details>",
            "</div>",
        ]
    )


def html_table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Render texts as an HTML table, under titles if there are any."""
    lines = ["".join(f"<th>{escape(text)}</th>" for text in head)] if head else []
    lines += [
        "".join(f'<td style="text-align:left">{escape(text)}</td>' for text in row) for row in rows
    ]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
