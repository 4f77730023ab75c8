"""A chain in a notebook: its totals, and its stages in a table. Everything is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Protocol

from memopt.models.budget import format_bytes


class ChainFigures(Protocol):
    """What is shown of a `memopt.models.chain.Chain`."""

    @property
    def input_bytes(self) -> int:
        """Of the chain's input."""

    @property
    def resident_bytes(self) -> int:
        """Live throughout."""

    @property
    def stages(self) -> Sequence[Any]:
        """Its stages."""

    @property
    def compute_time_s(self) -> float:
        """Every stage once, seconds."""


_SHOWN = 60
_HEAD = ("stage", "name", "forward, s", "backward, s", "output", "saved", "gradient")


def chain_html(chain: ChainFigures) -> str:
    """HTML of a chain; of a long one the first stages and how many more there are."""
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
            _table(totals),
            f"<details><summary>stages</summary>{_table(rows, _HEAD)}</details>",
            "</div>",
        ]
    )


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    lines = ["".join(f"<th>{escape(text)}</th>" for text in head)] if head else []
    lines += [
        "".join(f'<td style="text-align:left">{escape(text)}</td>' for text in row) for row in rows
    ]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
