"""Process groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from memopt.torch_private.access import optional

_GROUP = "torch.distributed.ProcessGroup"
_NAMES = (
    f"{_GROUP}._get_backend",
    f"{_GROUP}._device_types",
    "torch._C._distributed_c10d.Backend.Options._timeout",
)


def timeout_of(group: Any) -> timedelta | None:
    """Return how long a group's collectives wait for a rank; None: torch's own default."""
    if group is None or any(optional(name) is None for name in _NAMES):
        return None
    try:
        backends = [group._get_backend(kind) for kind in group._device_types]
    except RuntimeError:  # a group such as the fake one has no backend for a device
        return None
    options = (getattr(one, "options", None) for one in backends)  # not every backend has options
    known = (getattr(one, "_timeout", None) for one in options)
    return next((found for found in known if found is not None), None)
