"""The results page of the peers' benchmark, and the rows that it has."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Row:
    """A peer beside memopt at its peak. Bytes exclude what is resident; ratios are medians."""

    model: str
    peer: str
    peak_bytes: int
    over_own: float
    answers: str
    strategy: str
    our_peak_bytes: int
    our_over_eager: float
    our_answers: str
    ours_over_peer: float
    reason: str = ""
    over_eager: float | None = None
    kernels: str = "aten"


def table(rows: list[Row]) -> str:
    """Markdown."""
    unit = "x eager" if any(row.kernels != "aten" for row in rows) else "x its store-all"
    lines = [
        f"| model | peer | peak, MiB | {unit} | answers | memopt | peak, MiB "
        f"| {unit} | answers | memopt / peer |",
        "|---|---|---:|---:|---|---|---:|---:|---|---:|",
    ]
    for row in rows:
        ours = (
            f"{_named(row)} | {row.our_peak_bytes / 2**20:.1f} | {row.our_over_eager:.3f} | "
            f"{row.our_answers} | {row.ours_over_peer:.3f}"
            if not row.reason
            else f"{row.reason} | | | | "
        )
        lines.append(
            f"| {row.model} | {row.peer} | {row.peak_bytes / 2**20:.1f} "
            f"| {row.over_own:.3f}{fused(row)} | {row.answers} | {ours} |"
        )
    return "\n".join(lines)


_OVERHEADS = (
    "A compiled store-all has no overhead by definition, and its fused kernels save less than "
    "separate ones do: where its peak is below that of memopt's store-all, memopt recomputes to "
    "meet it. A few hundredths are within the noise of the machine."
)


_BEFORE = "The rows of these models were measured in an earlier run: {}."


def _base(rows: list[Row], own_random: bool) -> str:
    drawn = "which draws its random numbers as eager does (`fallback_random`)"
    if own_random:
        drawn = "which draws its random numbers in its own way, so that answers differ"
    if any(row.kernels != "aten" for row in rows):
        return (
            f"eager, beside `torch.compile`, {drawn}. memopt's compiled kernels draw their own: "
            "their answers are compared with those of an eager step whose dropouts drop the same"
        )
    return (
        "eager for eager peers, to its own store-all for `torch.compile` (memopt's to memopt's), "
        + drawn
    )


def _named(row: Row) -> str:
    return row.strategy if row.kernels == "aten" else f"{row.strategy}, {row.kernels}"


def fused(row: Row) -> str:
    """A compiled step's time, of eager's."""
    return "" if row.over_eager is None else f" ({row.over_eager:.2f} of eager)"


def page(
    rows: list[Row],
    command: str,
    threads: int,
    rounds: int,
    own_random: bool = False,
    before: Collection[str] = (),
) -> str:
    """The results page; rows of the models `before` were measured in an earlier run."""
    absolute = any(row.kernels != "aten" for row in rows)
    won = [row for row in rows if row.ours_over_peer < 1]
    lost = [
        f"- {row.model} against {row.peer}: "
        + (row.reason or f"{_named(row)}, {row.ours_over_peer:.3f}")
        for row in rows
        if not row.ours_over_peer < 1
    ]
    return "\n".join(
        [
            "# memopt beside what users would pick instead",
            "",
            f"`{command}`: torch {torch.__version__}, CPU, {threads} threads, {rounds} interleaved "
            "rounds. Peaks are above what is resident. Times are medians of paired ratios: to "
            f"{_base(rows, own_random)}. "
            '"equal": gradients and buffers are eager\'s bit for bit; "close": within '
            "1e-3 of each tensor's largest value, gradients also ten times what one rounding of "
            "the parameters, or eager's kernels without oneDNN, change in eager itself.",
            "",
            f"memopt is faster at the peer's peak in {len(won)} of {len(rows)} cells. Not in:",
            "",
            *lost,
            "",
            *([] if absolute else [_OVERHEADS, ""]),
            *([_BEFORE.format("; ".join(before)), ""] if before else []),
            table(rows),
            "",
        ]
    )


def joined(old: Sequence[Row], rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Rows with those of the other models of an older page, in its order, and these models."""
    names = list(dict.fromkeys(row.model for row in (*old, *rows)))
    measured = {row.model for row in rows}
    before = [row for row in old if row.model not in measured]
    every = sorted((*before, *rows), key=lambda row: names.index(row.model))
    return every, [name for name in names if name not in measured]


def rows_in(text: str, command: str) -> list[Row]:
    """The rows of a page that the same command made, in units of eager's time; else none."""
    return list(_read(text)) if f"`{command}`" in text else []


def _read(text: str) -> Iterator[Row]:
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or not cells[2][:1].isdigit():
            continue
        model, peer, peak, over, answers, ours, *rest = cells
        given = (model, peer, _bytes(peak), float(over), answers)
        if not any(rest):
            nan = float("nan")
            yield Row(*given, "-", 0, nan, "", nan, ours, kernels="compiled")
            continue
        strategy, _, kernels = ours.partition(", ")
        our_peak, our_over, our_answers, ratio = rest
        figures = (_bytes(our_peak), float(our_over), our_answers, float(ratio))
        yield Row(*given, strategy, *figures, kernels=kernels or "aten")


def _bytes(mebibytes: str) -> int:
    return round(float(mebibytes) * 2**20)
