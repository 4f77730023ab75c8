"""The report of a run of mutants."""

from __future__ import annotations

from tests.mutation.__main__ import report

SAME = "40: out_free_s: float = 0.0  ->  out_free_s: float = -1.0"


def row(outcome: str, change: str = "") -> dict[str, object]:
    module = "memopt.programs.link_clock"
    return {"group": "replay", "module": module, "outcome": outcome, "change": change}


def test_survivors_are_explained_or_called_not_noticed() -> None:
    rows = {
        "a": row("killed"),
        "b": row("out of time"),
        "c": row("survived", SAME),
        "d": row("survived", "51: for item in reads:  ->  for item in []:"),
        "e": row("killed"),
    }
    text = report(rows)
    assert "| replay | `memopt.programs.link_clock` | 5 | 2 | 1 | 2 | 1 |" in text
    assert "3 of 5 noticed (60.0%), of those that differ 3 of 4 (75.0%)" in text
    assert f"`{SAME}`: what is free before the step" in text
    assert "for item in []:`: NOT NOTICED" in text
