"""The ladder of ways to fit a device, as a table; and what takes the memory of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from memopt.models.budget import format_bytes
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.mesh import Mesh
from memopt.plan_record import PlanRecord
from memopt.programs.allocator_requests import reserved_by
from memopt.programs.instructions import Program
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.report.peak import fixed_bytes, peak_of
from memopt.report.texts import aligned, format_seconds, or_dash

CHUNKED, RECOMPUTE, OFFLOAD = "chunked loss", "recompute plan", "activation offload"
FEWER_BITS = "8-bit optimizer state"
FROZEN, MOVED = "moved frozen weights", "moved parameters and state"
TILED = "tiles of tokens"
SAME = frozenset({CHUNKED, RECOMPUTE, OFFLOAD, FROZEN, MOVED, TILED})
"""Changes that alter neither what is trained nor, up to rounding, its numbers."""


@dataclass(frozen=True)
class Rung:
    """One way to train the step. Bytes are of one device, all in.

    Attributes:
        changes: what is other than asked, such as ("bfloat16", "recompute plan"); (): nothing.
        fits: whether a plan of it fits the budget; that was validated.
        strategy: of the plan.
        peak_bytes: of the plan.
        needed_bytes: the least budget known to be enough; None: none is known.
        step_time_s: seconds of the step, its update included.
        samples_per_s: tokens or examples per second, of all devices.
        ranks: devices.
        trained: parameters that are trained, of one device.
        host_bytes: of the host, for each device: its peak.
        busy: stream, such as "compute" or "from host" → share of the step that it works.
        plan: the plan; of the model's graph, not for a model with weights.
    """

    changes: tuple[str, ...]
    fits: bool
    strategy: str = ""
    peak_bytes: int | None = None
    needed_bytes: int | None = None
    step_time_s: float | None = None
    samples_per_s: float | None = None
    ranks: int = 1
    trained: int = 0
    host_bytes: int = 0
    busy: Mapping[str, float] = field(default_factory=dict, hash=False)
    plan: PlanRecord | None = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The changes as one text."""
        return ", ".join(self.changes) or "as asked"

    @property
    def is_as_asked(self) -> bool:
        """Whether the changes leave the training as asked, up to rounding."""
        return SAME.issuperset(self.changes)

    @property
    def binds(self) -> str:
        """What a step that moves tensors waits for, and the host memory that it takes; "" for other
        steps."""
        if not self.host_bytes:
            return ""
        host = format_bytes(self.host_bytes)
        return f"{self.name}: busy are {self.streams}; {host} of host memory each."

    @property
    def streams(self) -> str:
        """The streams that work, and the share of the step in which each does; the busiest
        first."""
        shares = sorted(self.busy.items(), key=lambda one: -one[1])
        return ", ".join(f"{stream} {share:.0%}" for stream, share in shares)

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells of a table: whether it fits, what it needs, and how long its step takes."""
        needs = or_dash(self.needed_bytes, format_bytes)
        return "yes" if self.fits else "no", needs, or_dash(self.step_time_s, format_seconds)

    def figures(self) -> dict[str, Any]:
        """Return the rung for machines: bytes and seconds."""
        row = asdict(replace(self, plan=None))
        del row["plan"]
        return row

    @property
    def rate_of_one(self) -> float:
        """Tokens or examples per second of one device; 0: unknown."""
        return (self.samples_per_s or 0.0) / self.ranks

    def __str__(self) -> str:
        needs = or_dash(self.needed_bytes, format_bytes)
        step = "" if self.step_time_s is None else f", {format_seconds(self.step_time_s)} a step"
        return f"{self.name}: {'fits' if self.fits else 'does not fit'}, {needs}{step}"


def busy_shares(graph: Graph, program: Program, device: Device) -> dict[str, float]:
    """Return stream → share of a step that it works: "compute", and each direction of transfers,
    the network and the host where they are used."""
    timeline = replay(graph, program, device)
    busy = {"compute": timeline.time_s - timeline.total_stall_s}
    for one in (*timeline.transfers, *timeline.collectives, *timeline.host_updates):
        busy[one.direction.value] = busy.get(one.direction, 0.0) + one.end_s - one.start_s
    return {stream: busy_s / timeline.time_s for stream, busy_s in busy.items()}


@dataclass(frozen=True)
class NextStep:
    """A way on from a rung.

    Attributes:
        rung: where it leads.
        more_bytes: what its peak is more than the first's; negative: less.
        slower: its extra time, as a share of the first's; None: unknown.
    """

    rung: Rung
    more_bytes: int
    slower: float | None

    def __str__(self) -> str:
        size = format_bytes(abs(self.more_bytes))
        if self.slower is None:
            return f"{self.rung.name} frees {size}"
        size = f"{'−' if self.more_bytes < 0 else '+'}{size}"
        if self.slower == 0:
            return f"{size} costs no time ({self.rung.name})"
        effect = "costs" if self.slower > 0 else "saves"
        return f"{size} {effect} {abs(self.slower):.1%} time ({self.rung.name})"


def next_steps(here: Rung, others: Iterable[Rung]) -> tuple[NextStep, ...]:
    """Return the cheapest ways on from a rung: to less memory, and to more where that is faster,
    each with the least seconds for each byte; then rungs whose time is unknown, the smallest first.
    """
    known = [one for one in others if one.peak_bytes is not None]
    timed = [one for one in known if one.step_time_s is not None]
    less = [one for one in timed if _more(here, one) < 0]
    more = [one for one in timed if _more(here, one) > 0 and _longer(here, one) < 0]
    chosen = [
        min(found, key=lambda one: _longer(here, one) / abs(_more(here, one)))
        for found in (less, more)
        if found
    ]
    rest = [one for one in known if one.step_time_s is None and _more(here, one) < 0]
    now_s = here.step_time_s or 0.0
    steps = [
        NextStep(x, _more(here, x), _longer(here, x) / now_s if now_s else 0.0) for x in chosen
    ]
    rest.sort(key=lambda one: _more(here, one))
    return (*steps, *(NextStep(one, _more(here, one), None) for one in rest))


def _more(here: Rung, there: Rung) -> int:
    return (there.peak_bytes or 0) - (here.peak_bytes or 0)


def _longer(here: Rung, there: Rung) -> float:
    return (there.step_time_s or 0.0) - (here.step_time_s or 0.0)


@dataclass(frozen=True)
class Ladder:
    """Whether a step fits a device, what takes the memory, and the ways to make it fit; `print` it.

    Attributes:
        device: to train on.
        budget_bytes: of one device.
        ranks: devices that were asked for.
        dtype: of the parameters.
        optimizer: whose state is charged.
        lora: rank of the adapters asked for; 0: none.
        unit: of `Rung.samples_per_s`.
        parts: (what, bytes) of the step as asked, in the framework's own order, at its peak.
        rungs: those that fit, the most per second and device first; then the others, the smallest
            first.
        notes: what to know about the figures.
    """

    device: Device
    budget_bytes: int
    ranks: int
    dtype: str | None
    optimizer: str | None
    lora: int
    unit: str
    parts: tuple[tuple[str, int], ...]
    rungs: tuple[Rung, ...]
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the step fits as asked, without a change."""
        return any(rung.fits and not rung.changes for rung in self.rungs)

    @property
    def peak_bytes(self) -> int:
        """The peak of the step as asked, without context and fragmentation."""
        return sum(size for what, size in self.parts if what not in OUTSIDE)

    def best(self) -> Rung | None:
        """Return the fastest rung that fits; None if none does."""
        return next((rung for rung in self.rungs if rung.fits), None)

    def best_as_asked(self) -> Rung | None:
        """Return the fastest rung that fits and trains the same, in the same numbers, on the same
        devices; None if none does."""
        return next((rung for rung in self.rungs if rung.fits and rung.is_as_asked), None)

    def next_steps(self) -> tuple[NextStep, ...]:
        """Return the cheapest ways on from the fastest rung that fits; (): none fits."""
        best = self.best()
        return () if best is None else next_steps(best, (one for one in self.rungs if one.fits))

    def __str__(self) -> str:
        what = [self.dtype or "", self.optimizer or "no optimizer"]
        what += [f"LoRA r={self.lora}"] if self.lora else []
        what += [f"sharded over {self.ranks}"] if self.ranks > 1 else []
        head = f"{self.device.name}: {format_bytes(self.budget_bytes)}; {', '.join(what)}"
        needs = format_bytes(self.peak_bytes)
        best = self.best()
        answer = f"It fits: {needs}." if self.fits else f"It does not fit: it takes {needs}."
        if not self.fits and best is not None:
            answer += f" It fits with: {best.name}."
            same = self.best_as_asked()
            if same is not None and same is not best:
                answer += f" Trained as asked, with: {same.name}."
        answer += "".join(f" Next: {step}." for step in self.next_steps())
        sizes = [(what, format_bytes(size)) for what, size in self.parts]
        table: list[tuple[str, ...]] = [("ladder", "fits", "needs", "step", self.unit, "cost")]
        table += [self._cells(rung, best) for rung in self.rungs]
        notes = [*filter(None, (rung.binds for rung in self.rungs)), *self.notes]
        return "\n".join([head, answer, "", *aligned(sizes), "", *aligned(table), *notes])

    def _cells(self, rung: Rung, best: Rung | None) -> tuple[str, ...]:
        cost = "-"
        if best is not None and rung.samples_per_s and best.samples_per_s:
            share = round(rung.rate_of_one / best.rate_of_one - 1, 2) + 0.0
            cost = f"{share:+.0%}" if rung is not best else ""
        return (
            rung.name,
            *rung.cells,
            or_dash(
                rung.samples_per_s, lambda rate: f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
            ),
            cost,
        )

    def figures(self) -> dict[str, Any]:
        """Return the ladder for machines: bytes and seconds."""
        return {
            "device": self.device.name,
            "budget_bytes": self.budget_bytes,
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "ranks": self.ranks,
            "dtype": self.dtype,
            "optimizer": self.optimizer,
            "lora": self.lora,
            "unit": self.unit,
            "parts_bytes": dict(self.parts),
            "rungs": [{"name": rung.name, **rung.figures()} for rung in self.rungs],
            "next": [
                {"name": one.rung.name, "more_bytes": one.more_bytes, "slower": one.slower}
                for one in self.next_steps()
            ],
            "notes": list(self.notes),
        }


CONTEXT_BYTES = int(0.6 * 2**30)
"""Of CUDA, which a preset's capacity leaves out."""
FRAGMENTS, CONTEXT = "fragmentation", "context (outside the budget)"
OUTSIDE = (FRAGMENTS, CONTEXT)


def memory_parts(
    graph: Graph, optimizer_parts: Iterable[tuple[str, int]]
) -> tuple[tuple[str, int], ...]:
    """Return (what, bytes) of a step at its peak, in the framework's own order: what is there
    throughout, then gradients, activations and workspace; and beside the peak, what the allocator
    reserves on top of it and CUDA's context."""
    program = store_all(graph)
    parts = fixed_bytes(graph, optimizer_parts)
    there = {what: size for what, size in parts if what != "gradients"}
    peak = peak_of(graph, program)
    consumers = () if peak is None else peak.consumers
    words = {"gradient": "gradients", "workspace": "workspace"}
    found = dict.fromkeys(("gradients", "activations", "workspace"), 0)
    for one in consumers:
        if one.kind != "resident":
            found[words.get(one.kind, "activations")] += one.size_bytes
    total = replay(graph, program).peak_bytes
    found["activations"] += total - sum(there.values()) - sum(found.values())
    fragments = max(0, reserved_by(graph, program).reserved_peak_bytes - total)
    listed = {**there, **found, FRAGMENTS: fragments, CONTEXT: CONTEXT_BYTES}
    return tuple((what, size) for what, size in listed.items() if size)


def trained_otherwise(changes: tuple[str, ...]) -> list[str]:
    """Return the changes that train something else, or in other numbers."""
    return [one for one in changes if one not in SAME]


def offload_pays(rungs: Iterable[Rung]) -> bool:
    """Whether moving activations was faster than recomputing them, where both were tried."""
    rates = {rung.changes: rung.rate_of_one for rung in rungs}
    return all(
        rates[(*changes[:-1], OFFLOAD)] >= rate
        for changes, rate in rates.items()
        if changes[-1:] == (RECOMPUTE,) and (*changes[:-1], OFFLOAD) in rates
    )


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
                *rung.cells,
                or_dash(rung.samples_per_s, "{:,.0f}".format),
                one.why or rung.streams or "memory",
            )
        )
    return "\n".join(aligned(rows))


def mesh_figures(rungs: Iterable[MeshRung]) -> list[dict[str, Any]]:
    """Return the meshes for machines: bytes and seconds."""
    return [{"mesh": dict(one.mesh.sizes), "why": one.why, **one.rung.figures()} for one in rungs]
