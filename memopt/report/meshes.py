"""Meshes of ranks, each with the plan of one rank, as a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from memopt.models.budget import format_bytes
from memopt.models.mesh import Mesh
from memopt.report.ladder import Rung
from memopt.report.texts import aligned, format_seconds, or_dash


@dataclass(frozen=True)
class MeshRung:
    """A mesh, and how a rank of it trains.

    Attributes:
        mesh: of all ranks; a dimension of one rank is left out.
        rung: a rank's plan, or that none fits.
        why: why it was not planned; "": it was.
    """

    mesh: Mesh
    rung: Rung
    why: str = ""

    def __str__(self) -> str:
        return f"{self.mesh}: {self.why or self.rung}"


def best_mesh(rungs: Iterable[MeshRung]) -> MeshRung | None:
    """Return the mesh that fits with the most tokens/s; None: none fits."""
    fit = [one for one in rungs if one.rung.fits]
    return max(fit, key=lambda one: one.rung.rate_of_one, default=None)


def mesh_table(rungs: Iterable[MeshRung], unit: str) -> str:
    """Return the meshes as a table, those that fit and are fastest first."""
    rows: list[tuple[str, ...]] = [("mesh", "fits", "needs", "step", unit, "binds")]
    for one in sorted(rungs, key=lambda x: (not x.rung.fits, -x.rung.rate_of_one)):
        rung = one.rung
        how = f" ({', '.join(rung.changes)})" if rung.changes else ""
        rows.append(
            (
                f"{one.mesh}{how}",
                "yes" if rung.fits else "no",
                or_dash(rung.needed_bytes, format_bytes),
                or_dash(rung.step_time_s, format_seconds),
                or_dash(rung.samples_per_s, "{:,.0f}".format),
                one.why or rung.streams or "memory",
            )
        )
    return "\n".join(aligned(rows))


def mesh_figures(rungs: Iterable[MeshRung]) -> list[dict[str, Any]]:
    """Return the meshes for machines: bytes and seconds."""
    return [{"mesh": dict(one.mesh.sizes), "why": one.why, **one.rung.figures()} for one in rungs]
