"""Checks what surrounds a planned call: modes, hooks on saved tensors, caches.

A plan decides what a step saves for its backward. Autograd saves one token, which is the key to
that. Hooks that copy saved tensors would lose the token, and hooks that change their values would
not reach the step's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd.graph import saved_tensors_hooks

from memopt.models.warned import warn
from memopt.torch_private.modes import inside_transform, saved_tensor_hooks, traced_by_jit
from memopt.torch_private.modules import parametrized_cached
from memopt.user_code.aside import mode_around

_CHECKPOINT = "torch.utils.checkpoint"
_MODE = "it is inside of {}, which sees every operator, and a planned step runs others"
_HOOKS = (
    "it is inside of torch.autograd.graph.saved_tensors_hooks({}, ...), which may change what a "
    "step keeps for its backward, and on that a plan decides: without them the plan runs"
)
_CACHED = (
    "it is inside of torch.nn.utils.parametrize.cached(), which hands parametrized tensors from "
    "call to call, and a planned step computes its own"
)

_LEFT_ONCE = (
    "a checkpoint around a planned call ended its second forward before that left anything in {}: "
    "without a plan it may be left there twice. Within "
    "torch.utils.checkpoint.set_checkpoint_early_stop(False) second forwards run to their end, "
    "planned or not"
)

_TRANSFORM = (
    "it is inside of torch.func (vmap, grad, jvp) or of forward-mode AD, which sees no planned "
    "backward"
)
_TRACED = "it is traced by torch.jit.trace, which sees the operators of the model alone"


def why_not_inside() -> str | None:
    """Return why a call cannot run under a plan in these surroundings, for people; None: it can.

    torch's own hooks on saved tensors return what they get (`save_on_cpu`, a checkpoint's).
    """
    mode = mode_around()
    if mode is not None:
        return _MODE.format(mode)
    if parametrized_cached():
        return _CACHED
    if inside_transform():
        return _TRANSFORM
    if traced_by_jit():
        return _TRACED
    pack = _pack_around()
    if pack is None or _home(pack).partition(".")[0] in ("torch", "memopt"):
        return None
    return _HOOKS.format(f"{_home(pack)}.{getattr(pack, '__qualname__', type(pack).__qualname__)}")


def token_as_it_is() -> AbstractContextManager[object]:
    """Return a context in which autograd saves the token itself, whatever hooks the caller has.

    A checkpoint's hooks stay: it drops saved tensors, and runs the call again.
    """
    pack = _pack_around()
    if pack is None or _home(pack) == _CHECKPOINT:
        return nullcontext()
    return saved_tensors_hooks(_itself, _itself)


def tell_of_stop(error: Exception, left: Sequence[str]) -> None:
    """Warn if an error is a checkpoint's, which ends a second forward that it needs no longer.

    Args:
        error: what a planned call has raised.
        left: the Python objects in which its forward leaves something.
    """
    if left and type(error).__module__ == _CHECKPOINT:
        warn(_LEFT_ONCE.format(", ".join(left)))


def _pack_around() -> Any:
    """Return the innermost hook that packs saved tensors; None: there is none."""
    hooks = saved_tensor_hooks()
    return None if hooks is None else hooks[0]


def _home(pack: Any) -> str:
    """Return the module of a hook."""
    return str(getattr(pack, "__module__", None) or type(pack).__module__)


def _itself(value: Any) -> Any:
    return value
