"""curve(): a model's whole trade-off between memory and time, in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from memopt.api.comparing import compare
from memopt.api.comparison import Comparison
from memopt.models.device import Device
from memopt.models.mesh import Mesh
from memopt.models.options import Mode, Returns
from memopt.models.progress import Progress
from memopt.strategies import Strategy


def curve(
    model: Any,
    inputs: Any = None,
    *,
    strategies: Sequence[str | Strategy] | str | Strategy | None = None,
    points: int = 20,
    loss_fn: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] = (),
    device: Device | str | None = None,
    mode: Mode = "measure",
    optimizer: Any = None,
    time_limit_s: float | None = None,
    workers: int | None = None,
    cache: bool = True,
    mesh: Mesh | None = None,
    returns: Returns = "all",
    progress: bool | Progress = True,
) -> Comparison:
    """Compute the step time at each of `points` budgets, spread evenly from the smallest that any
    of the strategies can meet to what suffices without a plan.

    `.plot()` draws it, `.to_csv(path)` writes it, `.report(path)` makes a page whose slider goes
    over its plans. Ctrl-C returns what is done.

    Args:
        model, inputs, loss_fn, targets, device, mode, optimizer: as for `memopt.plan`.
        strategies: names or instances; None: those of `memopt.compare`.
        points: how many budgets, at least 2.
        time_limit_s: seconds for each plan.
        workers, cache, mesh, returns, progress: as for `memopt.compare`.

    Raises:
        CaptureError: the model cannot be captured.
        ValueError: unknown strategy, fewer than 2 points, misuse; the message has the remedy.
    """
    return compare(
        model,
        inputs,
        strategies=strategies,
        points=points,
        loss_fn=loss_fn,
        targets=targets,
        device=device,
        mode=mode,
        optimizer=optimizer,
        time_limit_s=time_limit_s,
        workers=workers,
        cache=cache,
        mesh=mesh,
        returns=returns,
        progress=progress,
    )
