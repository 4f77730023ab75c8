"""Plan, the user's record of a checked way to run one training step within a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import TYPE_CHECKING, Any

from memopt.api.ranks import noting_ranks, telling_ranks
from memopt.models.budget import format_bytes
from memopt.models.options import Mismatch
from memopt.plan_record import PlanRecord
from memopt.stages import LastCapture

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from torch import nn

    from memopt.executor.train_step import TrainStep
    from memopt.models.progress import Progress
    from memopt.report.lanes import StepLanes
    from memopt.report.page.document import Page
    from memopt.report.step_check import StepCheck
    from memopt.step.inputs import Call


@dataclass(frozen=True)
class Plan(PlanRecord):
    """A plan that the validator has passed; see `memopt.plan_record.PlanRecord` for its fields."""

    _last: LastCapture = field(init=False, repr=False, compare=False, default_factory=LastCapture)

    @classmethod
    def of(cls, record: PlanRecord) -> Plan:
        """Make a plan of a record."""
        return cls(**{one.name: getattr(record, one.name) for one in fields(PlanRecord)})

    @property
    def code(self) -> str:
        """Return the generated Python that runs the plan's forward and backward."""
        from memopt.executor.install import install

        if self.profiled is None:
            raise ValueError(
                "this plan was made from a cost model, not from a module: it cannot show its code; "
                "call memopt.plan(model, inputs, ...)"
            )
        return install(self.profiled.captured, self.profiled.lowering, self.program).source

    @telling_ranks("a plan is applied", 1)
    def apply(
        self,
        model: nn.Module,
        inputs: Any = None,
        *,
        interpreted: bool = False,
        on_mismatch: Mismatch = "error",
        checked: bool = False,
        cuda_graph: bool = False,
    ) -> nn.Module:
        """Return the model as a drop-in module whose training step runs under the plan.

        A model other than the planned one is captured again, and refused unless its mode, shapes
        and graph are the planned ones.

        Args:
            model: the module the plan was made from, or one with the same structure; its
                parameters are shared, not copied.
            inputs: example inputs of the planned shapes, to capture the model with; None: those
                of planning (zeros, if the plan is from a file).
            interpreted: run instruction by instruction (slower; for debugging).
            on_mismatch: what happens in a call with other shapes, dtypes, modes or attributes that
                the forward reads: "plan" plans for it, once, within the same budget (this plan's
                loss is charged again); "original" runs the unplanned model; "error" raises
                GuardError. The returned module's `.calls` counts the calls of each way.
            checked: for a plan with addresses, poison those that are freed and check every read
                (slower; for debugging).
            cuda_graph: capture the step of a plan with addresses (`place=True`) after two steps
                and replay it as CUDA graphs, for steps of many short kernels: one for the forward
                and one for the backward, or segments of them, between which runs what works on the
                host, depends on values or draws the same random numbers again. Gradients come all
                at once, inside DistributedDataParallel, too.

        Raises:
            PlanFileError: the model, its mode or the inputs are not the planned ones; the
                message says what differs.
            ValueError: the plan is of a bare Chain or Graph, or cannot be captured.
        """
        from memopt.executor.apply import apply_plan, behaviour
        from memopt.executor.calls import warn_of_hooks_around

        warn_of_hooks_around()
        return apply_plan(
            self,
            model,
            inputs,
            interpreted=interpreted,
            on_mismatch=behaviour(on_mismatch, self._plan_again),
            checked=checked,
            cuda_graph=cuda_graph,
            last=self._last,
        )

    @telling_ranks("a plan is applied", 1)
    def train_step(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        *,
        interpreted: bool = False,
        checked: bool = False,
        undo: bool = False,
        scaler: Any = None,
    ) -> TrainStep:
        """Return the whole step, updates included: `step(*inputs, targets=...) -> loss`, or of
        several micro-batches, `step.accumulate([(inputs, targets), ...]) -> losses`.

        The plan must have been made with `loss_fn=`, an optimizer instance and `whole_step=True`
        (or a strategy for graphs that recomputes nothing, as `olla`).

        Args:
            model: the planned model.
            loss_fn: the planned loss.
            optimizer: the planned optimizer, or one over the same parameters.
            interpreted: run instruction by instruction (slower; for debugging).
            checked: as for `apply`.
            undo: undo a failed step entirely, parameters and optimizer state included. That takes
                host copies of them, as large as they are, and the time to write these in each
                step. Without it, updates that were done before the failure stay, and the error
                says how many.
            scaler: the `torch.amp.GradScaler` of the losses, if it was planned with one.

        Raises:
            ValueError: the plan is not of this step, the optimizer cannot be split, or the copies
                for `undo` are beyond the plan's host budget.
        """
        from memopt.executor.make_step import train_step

        return train_step(
            self,
            model,
            loss_fn,
            optimizer,
            interpreted=interpreted,
            checked=checked,
            undo=undo,
            scaler=scaler,
        )

    def _plan_again(self, model: nn.Module, call: Call) -> nn.Module:
        """Plan another call within the same budget, and return the model under that plan."""
        from memopt.api.another_call import plan_for

        return Plan.of(plan_for(self, model, call)).apply(model)

    @telling_ranks("a plan is checked", 1)
    def check(
        self,
        model: nn.Module,
        inputs: Any = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        targets: tuple[Any, ...] = (),
    ) -> StepCheck:
        """Run a few steps of the real model under the plan and compare with the prediction.

        The model's parameters, buffers, gradients and random state are left as they were.

        Args:
            model: as for `apply`.
            inputs: the inputs to run; None: those of planning (zeros, if the plan is from a file).
            loss_fn: your loss, `loss_fn(output, *targets)`; None: the sum of all outputs.
            targets: what your loss takes beside the output.

        Raises:
            PlanFileError, ValueError: as `apply`.
        """
        from memopt.executor.check import measure_step
        from memopt.report.step_check import StepCheck

        measured_peak_bytes, measured_time_s = measure_step(
            self, model, inputs, loss_fn, targets, self._last
        )
        return StepCheck(
            predicted_peak_bytes=self.peak_bytes,
            measured_peak_bytes=measured_peak_bytes,
            predicted_time_s=self.step_time_s,
            measured_time_s=measured_time_s,
            budget_bytes=self.budget,
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan to a file that `memopt.load` reads, in this or another process.

        The file appears whole or not at all. It is JSON: figures, graph, program and a
        description of the model and its inputs, never the model's weights.

        Raises:
            PlanFileError: the example inputs contain something that a file cannot hold, or `path`
                exists and is no regular file.
            OSError: the file cannot be written.
        """
        from memopt.files import save

        save(self, path)

    def plot(self, kind: str = "memory", ax: Axes | None = None) -> Axes:
        """Draw the plan.

        Args:
            kind: "memory" (over the step, the plan stacked by kind and the baseline),
                "schedule" (runs and recomputations) or "timeline" (compute and transfers).
            ax: where to draw; None: a new figure.

        Returns:
            The Axes; `.figure.savefig(path)` writes a picture.

        Raises:
            ImportError: matplotlib is missing; the message names the extra to install.
            ValueError: there is no such plot of this plan.
        """
        from memopt.report.timeline_plot import plot_plan

        return plot_plan(self, kind, ax)

    def trace(
        self,
        path: str | PathLike[str],
        model: nn.Module | None = None,
        inputs: Any = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        targets: tuple[Any, ...] = (),
    ) -> tuple[StepLanes, ...]:
        """Write a Chrome / Perfetto trace: compute and both copy streams, with stalls.

        It holds the predicted step and, given a model, a measured one (that of median time among
        five); the model is left as it was. Open the file in ui.perfetto.dev.

        Args:
            path: the file, ".json".
            model: the planned model, as for `apply`; None: the prediction alone.
            inputs, loss_fn, targets: what the measured step runs, as for `check`.

        Returns:
            The lanes that were written: the predicted step's, then the measured one's.

        Raises:
            PlanFileError, ValueError: as `apply`.
            OSError: the file cannot be written.
        """
        from memopt.report.lanes import measured_lanes, predicted_lanes, write_trace

        steps: tuple[StepLanes, ...] = (predicted_lanes(self),)
        if model is not None:
            from memopt.executor.check import record_step

            recorded = record_step(self, model, inputs, loss_fn, targets, self._last)
            steps += (measured_lanes(self, recorded),)
        write_trace(path, *steps)
        return steps

    def report(
        self,
        path: str | PathLike[str] | None = None,
        model: nn.Module | None = None,
        inputs: Any = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        targets: tuple[Any, ...] = (),
        points: int = 5,
        title: str | None = None,
        progress: bool | Progress = True,
    ) -> Page:
        """Make one self-contained HTML page that explains the plan; see docs/explorer.md.

        Given a model, a recorded step is drawn beside the predicted one, as in `trace`, and its
        measured peak and time as in `check`. The model is left as it was.

        Args:
            path: the file, ".html"; None: none is written. A notebook shows the returned page.
            model: the planned model, as for `apply`; None: the prediction alone.
            inputs, loss_fn, targets: what the measured step runs, as for `check`.
            points: how many further plans of the strategy the page's budget slider has, from its
                smallest budget to what suffices without a plan (at least 2; 0: only this plan).
                They are planned here, for at most a minute; Ctrl-C ends that earlier.
            title: heads the page; None: the model's class.
            progress: True shows a bar on a terminal; or your own callback.

        Raises:
            ImportError: bokeh is missing; the message names the extra to install.
            PlanFileError, ValueError: as `apply`, or one point.
            OSError: the file cannot be written.
        """
        from memopt.api.pages import page_of_plan
        from memopt.report.progress import reporting

        check = measured = None
        if model is not None:
            from memopt.executor.check import record_step
            from memopt.report.lanes import measured_lanes

            check = self.check(model, inputs, loss_fn=loss_fn, targets=targets)
            recorded = record_step(self, model, inputs, loss_fn, targets, self._last)
            measured = measured_lanes(self, recorded)
        with reporting(progress) as report:
            page = page_of_plan(
                self, points=points, progress=report, title=title, measured=measured, check=check
            )
        if path is not None:
            page.write(path)
        return page

    def snapshot(self, path: str | PathLike[str]) -> None:
        """Write the plan's memory as a snapshot that PyTorch's memory visualiser opens
        (pytorch.org/memory_viz, or `torch.cuda._memory_viz`).

        Args:
            path: the file, ".pickle".

        Raises:
            OSError: the file cannot be written.
        """
        from memopt.report.snapshot import write_snapshot

        write_snapshot(path, self.graph, self.program, self.device)

    def summary(self) -> str:
        """Return the plan as text of at most 80 columns."""
        from memopt.report.summary import plan_summary

        return plan_summary(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        """Return the plan itself, since a plan never changes."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the plan as its file: without the captured model, which `apply` captures again."""
        from memopt.files import to_bytes

        return _unpickled, (to_bytes(self),)

    def _repr_html_(self) -> str:
        from memopt.report.summary import plan_html

        return plan_html(self)

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        budget = "no limit" if self.budget is None else format_bytes(self.budget)
        return (
            f"<memopt.Plan {self.strategy.name} {self.status.value}: "
            f"peak {format_bytes(self.peak_bytes)} of {budget}>"
        )


def load(path: str | PathLike[str]) -> Plan:
    """Read a plan file.

    Raises:
        PlanFileError: it is missing, damaged, edited, or of another version.
    """
    from memopt.files import load as read

    with noting_ranks("a plan is loaded"):
        return Plan.of(read(path))


def _unpickled(data: bytes) -> Plan:
    from memopt.files import from_bytes

    return Plan.of(from_bytes(data))
