"""Private names in the expressions that name what a trace has read."""

from __future__ import annotations

from typing import Any

from memopt.torch_private.access import private

ROOT = "L['self']._modules['_export_root']"
"""The captured model, in Dynamo's expressions."""
GLOBAL_HOOKS = tuple(
    f"tuple(torch.nn.modules.module.{name}.values())"
    for name in (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
    if private(f"torch.nn.modules.module.{name}") is not None
)
"""The hooks on all modules."""
DEFAULT_DEVICE = "torch.utils._device.CURRENT_DEVICE"
"""The device of new tensors."""
private(DEFAULT_DEVICE)


def draws_in_numpy(function: Any) -> bool:
    """Whether a function of a trace draws numpy's random numbers."""
    home = str(getattr(function, "__module__", None))
    return home.startswith("torch.") and home == private("torch._numpy.random").__name__
