"""What a user should know about the loss: whether the plan covers it, and what it costs beside."""

from __future__ import annotations

import math

from memopt.models.budget import format_bytes
from memopt.profiler.capture import Captured


def loss_notes(captured: Captured, *, covered: bool) -> tuple[str, ...]:
    """Notes on the loss of a captured model.

    Args:
        captured: tells the outputs that carry gradients: a scalar among them is the model's loss.
        covered: the memory of the user's own loss is charged, or the step is planned as a whole.
    """
    outputs = [tangent.meta["val"] for tangent in captured.tangents]
    others = [value for value in outputs if value.dim()]
    if len(others) == len(outputs):
        return () if covered else (_MODULE_ONLY,)
    if not others:
        return ()
    size_bytes = sum(math.prod(value.shape) * value.element_size() for value in others)
    what = "another output" if len(others) == 1 else f"{len(others)} other outputs"
    return (
        f"The model returns a scalar (its loss) beside {what}; gradients of "
        f"{format_bytes(size_bytes)} for the rest are charged, and made, as well. If you train "
        "with that loss alone, say so: loss_fn=lambda output: output.loss (or output[0]).",
    )


_MODULE_ONLY = (
    "The budget covers the module; pass loss_fn= to have the memory of your loss charged too."
)
