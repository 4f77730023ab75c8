"""The page of the peers' benchmark keeps the rows of models that are not measured anew."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.peers.page import Row, joined, page, rows_in

MIB = 2**20
COMMAND = "python -m benchmarks.peers --kernels aten compiled"


def row(model: str, ratio: float) -> Row:
    figures = (f"torch.compile {1}", 7 * MIB, 0.9, "close", "rotor", 6 * MIB, 0.8, "equal", ratio)
    return Row(model, *figures, kernels="compiled")


def test_rows_of_a_page_are_those_it_was_made_of() -> None:
    rows = [row("A, 2 x 3", 0.9), row("B", 1.05), row("B", 0.7)]
    rows[1] = replace(rows[1], strategy="store-all", kernels="aten")
    none = Row(
        "C", "torch.compile 0.3", MIB, 1.1, "close", "-", 0, 0.0, "", 0.0, "rotor needs 3 MiB"
    )
    text = page([*rows, none], COMMAND, 1, 7)
    *found, last = rows_in(text, COMMAND)
    assert found == rows
    assert (last.model, last.reason, last.our_peak_bytes) == ("C", "rotor needs 3 MiB", 0)
    assert rows_in(text, COMMAND + " --own-random") == []


def test_a_model_that_is_measured_anew_keeps_its_place() -> None:
    old = [row("A", 0.9), row("B", 1.05), row("C", 0.7)]
    new = [row("B", 0.95), row("D", 0.5)]
    every, before = joined(old, new)
    assert [(one.model, one.ours_over_peer) for one in every] == [
        ("A", 0.9),
        ("B", 0.95),
        ("C", 0.7),
        ("D", 0.5),
    ]
    assert before == ["A", "C"]
    assert "measured in an earlier run: A; C." in page(every, COMMAND, 1, 7, False, before)
