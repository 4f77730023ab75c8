"""Sets Hugging Face's hooks that record hidden states and attentions before a model is captured.

Its models set them at the first call that asks for such outputs, behind a lock that no trace can
take. If a capture fails there, a forward finds the models that ask, its state is restored, and they
get their hooks as their first call would set them, which planning leaves set. An idle hook does
nothing.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any
from unittest import mock

from torch import nn

from memopt.step.inputs import Call
from memopt.torch_private.modules import forward_hooks_of
from memopt.user_code.restored_state import forward_restored, outlasting

_HOME = "transformers.utils.output_capturing"
_SET = "_output_capturing_hooks_installed"


def hooks_set(model: nn.Module, call: Call, error: Exception) -> bool:
    """Set the hooks that a model's first call would set.

    Returns:
        Whether hooks were set, so that another capture is worth trying.
    """
    home: Any = sys.modules.get(_HOME)
    stack = getattr(error, "real_stack", None) or ()
    if home is None or all(frame.filename != home.__file__ for frame in stack):
        return False
    asked: dict[int, nn.Module] = {}
    thread, install = threading.get_ident(), home.maybe_install_capturing_hooks

    def ask(one: nn.Module) -> None:
        if threading.get_ident() != thread:
            install(one)
        elif not getattr(one, _SET, False):
            asked.setdefault(id(one), one)

    with (
        mock.patch.object(home, "maybe_install_capturing_hooks", ask),
        contextlib.suppress(Exception),  # outputs that are not recorded may be missing
        forward_restored(model, call),
    ):
        pass
    for one in asked.values():
        install(one)
    _keep(list(asked.values()))
    return bool(asked)


def _keep(models: list[nn.Module]) -> None:
    """Keep the same hooks where planning restores the models: the plan is of what is left."""
    hooks = [(one, dict(forward_hooks_of(one))) for model in models for one in model.modules()]

    def change() -> None:
        for one, own in hooks:
            forward_hooks_of(one).update(own)
        for model in models:
            setattr(model, _SET, True)

    outlasting(change)
