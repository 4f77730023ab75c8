"""The chain cost model of Rotor §3: stages in a line, forward then backward.

Stage ℓ = 1..n turns a^{ℓ-1} into a^ℓ; the last stage is the loss. Symbols of the paper beside
the fields: u_f, u_b, ω_a, ω_ā (contains the output), ω_δ, o_f when saving (F_all) and when not
(F_∅, F_ck), o_b. Parameter gradients, which the paper leaves out, appear in their stage's
backward and stay to the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Integral
from random import Random

from memopt.models.chain_rows import Shape, Table, random_rows, table_rows
from memopt.models.checks import check_figures, check_sums


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a chain: `Stage(forward_time_s=1e-3, backward_time_s=2e-3, output_bytes=2**20)`.

    Attributes:
        forward_time_s: u_f, seconds.
        backward_time_s: u_b, seconds.
        output_bytes: ω_a, the stage's output a^ℓ.
        saved_bytes: ω_ā, what F_all keeps for the backward, the output included; None: the output
            alone. It may be a little less than output_bytes (Rotor's own Table 2, stage 4, is).
        gradient_bytes: ω_δ, the gradient of the output; None: as large as the output.
        forward_overhead_bytes: o_f of F_all, on top of its inputs and ω_ā.
        forward_no_save_overhead_bytes: o_f of F_∅ and F_ck, on top of their inputs and ω_a;
            None: the same as forward_overhead_bytes.
        backward_overhead_bytes: o_b, on top of the backward's inputs and outputs. It may be
            negative (docs/strategies/rotor.md, "Deviations", and inputs freed before the
            backward's peak).
        parameter_gradient_bytes: g, held from this stage's backward to the end of the step.
        name: for people.
    """

    forward_time_s: float
    backward_time_s: float
    output_bytes: int
    saved_bytes: int = None  # type: ignore[assignment]  # resolved when the stage is made
    gradient_bytes: int = None  # type: ignore[assignment]
    forward_overhead_bytes: int = 0
    forward_no_save_overhead_bytes: int | None = None
    backward_overhead_bytes: int = 0
    parameter_gradient_bytes: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        owner = f"Stage {self.name!r}" if self.name else "Stage"
        for default in ("saved_bytes", "gradient_bytes"):
            if getattr(self, default) is None:
                object.__setattr__(self, default, self.output_bytes)
        sizes = ("output_bytes", "saved_bytes", "gradient_bytes", "parameter_gradient_bytes")
        check_figures(self, "Stage", sizes, ("forward_time_s", "backward_time_s"))
        for name in (
            "forward_overhead_bytes",
            "forward_no_save_overhead_bytes",
            "backward_overhead_bytes",
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
                raise ValueError(f"{owner}: {name} must be a whole number of bytes, got {value!r}")
            if value is not None:
                object.__setattr__(self, name, int(value))

    @property
    def sizes_bytes(self) -> tuple[int, ...]:
        """Every size of the stage, overheads without their signs."""
        return (
            self.output_bytes,
            self.saved_bytes,
            self.gradient_bytes,
            self.parameter_gradient_bytes,
            abs(self.forward_overhead_bytes),
            abs(self.no_save_overhead_bytes),
            abs(self.backward_overhead_bytes),
        )

    @property
    def no_save_overhead_bytes(self) -> int:
        """o_f of F_∅ and F_ck, with the default resolved."""
        if self.forward_no_save_overhead_bytes is None:
            return self.forward_overhead_bytes
        return self.forward_no_save_overhead_bytes


@dataclass(frozen=True)
class Chain:
    """A heterogeneous chain. Stages are numbered from 1; the last one is the loss.

    `homogeneous`, `random` and `from_table` make chains, too, and `memopt.instances()` has those of
    the papers. Every strategy plans one: those for graphs get its operators.

    Attributes:
        input_bytes: ω_a^0. It is part of the step's memory: a^0 is never freed.
        stages: the stages 1..n, the loss last (it may cost nothing).
        resident_bytes: parameters, buffers, constants..., always live.
        input_gradient_bytes: ω_δ^0, the gradient of the input, 0 if it is not wanted.
    """

    input_bytes: int
    stages: tuple[Stage, ...]
    resident_bytes: int = 0
    input_gradient_bytes: int = 0

    def __init__(
        self,
        input_bytes: int,
        stages: Iterable[Stage],
        resident_bytes: int = 0,
        input_gradient_bytes: int = 0,
    ) -> None:
        object.__setattr__(self, "input_bytes", input_bytes)
        object.__setattr__(self, "stages", tuple(stages))
        object.__setattr__(self, "resident_bytes", resident_bytes)
        object.__setattr__(self, "input_gradient_bytes", input_gradient_bytes)
        beside = ("input_bytes", "resident_bytes", "input_gradient_bytes")
        check_figures(self, "Chain", beside)
        if not self.stages:
            raise ValueError("Chain: at least one stage is needed (the last one is the loss)")
        for stage in self.stages:
            if not isinstance(stage, Stage):
                raise ValueError(f"Chain: stages must be memopt.Stage values, got {stage!r}")
        sizes = [x for stage in self.stages for x in stage.sizes_bytes]
        times = (x for s in self.stages for x in (s.forward_time_s, s.backward_time_s))
        check_sums("Chain", (*sizes, *(getattr(self, name) for name in beside)), times)

    @classmethod
    def homogeneous(
        cls,
        length: int,
        *,
        forward_time_s: float = 1.0,
        backward_time_s: float = 2.0,
        output_bytes: int = 1,
        input_bytes: int | None = None,
        resident_bytes: int = 0,
        input_gradient_bytes: int = 0,
        **each: int,
    ) -> Chain:
        """Make a chain of equal stages and a loss that costs nothing.

        Args:
            length: how many stages, the loss included, at least 2.
            forward_time_s, backward_time_s, output_bytes: of each stage.
            input_bytes: None: as large as an output.
            resident_bytes, input_gradient_bytes: of the chain.
            each: other fields of every `Stage`, such as `saved_bytes`.

        Raises:
            ValueError: no stage beside the loss, or a figure that no stage can have.
        """
        if isinstance(length, bool) or not isinstance(length, int) or length < 2:
            raise ValueError(f"Chain.homogeneous: length must be at least 2, got {length!r}")
        stages = [
            Stage(forward_time_s, backward_time_s, output_bytes, **each, name=f"stage{k}")
            for k in range(1, length)
        ]
        first = output_bytes if input_bytes is None else input_bytes
        loss = Stage(0.0, 0.0, 0, name="loss")
        return cls(first, [*stages, loss], resident_bytes, input_gradient_bytes)

    @classmethod
    def random(
        cls,
        seed: int | Random,
        length: int = 10,
        *,
        shape: str | None = None,
        max_bytes: int = 12,
        max_time_s: int = 9,
        parameter_gradients: bool = False,
        negative_overheads: bool = False,
        resident_bytes: int = 0,
    ) -> Chain:
        """Draw a chain: the same seed gives the same one. All figures are whole numbers.

        Args:
            seed: of the drawing, or a generator that draws on.
            length: how many stages, the loss included.
            shape: the course of the sizes: "heterogeneous", "equal", "growing", "shrinking" or
                "sparse" (many zeros); None: any of them.
            max_bytes: the largest activation.
            max_time_s: the longest operation, seconds.
            parameter_gradients: whether stages have gradients of their own.
            negative_overheads: whether backward overheads may be below 0.
            resident_bytes: of the chain.

        Raises:
            ValueError: no stage, or an unknown shape.
        """
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(f"Chain.random: at least one stage is needed, got {length!r}")
        course = None if shape is None else Shape(shape)
        rng = seed if isinstance(seed, Random) else Random(seed)
        limits = (max_bytes, max_time_s, parameter_gradients, negative_overheads)
        first, wanted, rows = random_rows(rng, length, course, *limits)
        beside = {"resident_bytes": resident_bytes, "input_gradient_bytes": wanted}
        return cls.from_table(rows, input_bytes=first, **beside)

    @classmethod
    def from_table(
        cls,
        table: Table,
        *,
        input_bytes: int = 0,
        resident_bytes: int = 0,
        input_gradient_bytes: int = 0,
    ) -> Chain:
        """Read a chain from a table with a row for each stage, the loss last, and a Stage's fields
        as columns: forward_time_s, backward_time_s, output_bytes and, if you like, the others. An
        empty entry leaves a field at its default.

        Args:
            table: a CSV file's path (its first line names the columns), a pandas data frame, or
                rows: mappings from columns to values.
            input_bytes, resident_bytes, input_gradient_bytes: of the chain.

        Raises:
            ValueError: a column is unknown or missing, or an entry wrong; names the row.
            OSError: the file cannot be read.
        """
        rows = table_rows(table, [one.name for one in fields(Stage)])
        stages = []
        for number, row in enumerate(rows, 1):
            try:
                stages.append(Stage(**row))  # type: ignore[arg-type]  # Stage checks its figures
            except ValueError as error:
                raise ValueError(f"Chain.from_table: row {number}: {error}") from error
        return cls(input_bytes, stages, resident_bytes, input_gradient_bytes)

    def __len__(self) -> int:
        """Number of stages, the loss included (the paper's L+1)."""
        return len(self.stages)

    def activation_bytes(self, index: int) -> int:
        """Return ω_a of a^index, index 0 (the chain's input) to n."""
        return self.input_bytes if index == 0 else self.stages[index - 1].output_bytes

    def gradient_bytes(self, index: int) -> int:
        """Return ω_δ of δ^index, index 0 (the gradient of the input) to n."""
        return self.input_gradient_bytes if index == 0 else self.stages[index - 1].gradient_bytes

    def _repr_html_(self) -> str:
        from memopt.models.chain_html import chain_html

        return chain_html(self)

    @cached_property
    def compute_time_s(self) -> float:
        """One forward and one backward of every stage, seconds: a lower bound for every plan."""
        return sum(stage.forward_time_s + stage.backward_time_s for stage in self.stages)
