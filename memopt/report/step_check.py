"""A planned step's predicted memory and time beside the measured ones."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.models.budget import format_bytes
from memopt.report.texts import format_seconds


@dataclass(frozen=True, slots=True)
class StepCheck:
    """Prediction and measurement of a planned step; `print` shows both.

    Attributes:
        predicted_peak_bytes: the plan's peak, resident included.
        measured_peak_bytes: resident bytes and the most that the step allocated at once.
        predicted_time_s: the plan's step time, seconds.
        measured_time_s: the median of the measured steps, seconds.
        budget_bytes: the plan's budget; None: no limit.
    """

    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_time_s: float
    measured_time_s: float
    budget_bytes: int | None

    @property
    def peak_ratio(self) -> float:
        """Return measured over predicted peak."""
        return self.measured_peak_bytes / max(1, self.predicted_peak_bytes)

    @property
    def time_ratio(self) -> float:
        """Return measured over predicted time; 0 if no time was predicted."""
        if self.predicted_time_s <= 0:
            return 0.0
        return self.measured_time_s / self.predicted_time_s

    @property
    def within_budget(self) -> bool:
        """Whether the measured peak keeps to the budget."""
        return self.budget_bytes is None or self.measured_peak_bytes <= self.budget_bytes

    def __str__(self) -> str:
        rows = [
            ("", "predicted", "measured", "measured/predicted"),
            (
                "peak",
                format_bytes(self.predicted_peak_bytes),
                format_bytes(self.measured_peak_bytes),
                f"{self.peak_ratio:.4f}",
            ),
            (
                "step time",
                format_seconds(self.predicted_time_s),
                format_seconds(self.measured_time_s),
                f"{self.time_ratio:.2f}",
            ),
        ]
        lines = [f"{a:<10}{b:>12}{c:>12}{d:>20}" for a, b, c, d in rows]
        if self.budget_bytes is not None:
            verdict = "kept" if self.within_budget else "EXCEEDED"
            lines.append(f"{'budget':<10}{format_bytes(self.budget_bytes):>12}  {verdict}")
        return "\n".join(lines)
