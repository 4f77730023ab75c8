"""A planned step inside the user's hooks on saved tensors (`torch.autograd.graph`).

What a step keeps for its backward is the plan's. Autograd saves one token, by which that is found:
hooks that copy what they are given would lose it, and those that change values would not change the
step's.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd.graph import saved_tensors_hooks

from memopt.profiler.torch_private import imported

_CHECKPOINT = "torch.utils.checkpoint"
_said: set[Any] = set()


def token_as_it_is() -> AbstractContextManager[object]:
    """Context in which autograd saves the token itself, whatever hooks the caller has.

    A checkpoint's hooks stay: it drops what is saved, and runs the call again. Hooks that are not
    torch's own are warned about, once.
    """
    hooks = imported("torch._C._autograd", "_top_saved_tensors_default_hooks")(True)
    if hooks is None:
        return nullcontext()
    pack = hooks[0]
    home = getattr(pack, "__module__", None) or type(pack).__module__
    if home == _CHECKPOINT:
        return nullcontext()
    name = f"{home}.{getattr(pack, '__qualname__', type(pack).__qualname__)}"
    if not home.startswith("torch.") and name not in _said:
        _said.add(name)
        warnings.warn(
            f"a planned step runs inside torch.autograd.graph.saved_tensors_hooks({name}, ...), "
            "which do not see what it keeps for its backward: the plan decides on that. Where "
            "they change values (compression), gradients are those without them; if that "
            "matters, call the unplanned model there (planned.original, or "
            "memopt.unwrap(model)). This is said once",
            stacklevel=6,
        )
    return saved_tensors_hooks(_itself, _itself)


def _itself(value: Any) -> Any:
    return value
