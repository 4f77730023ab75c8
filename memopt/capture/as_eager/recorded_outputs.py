"""Sets Hugging Face's hooks that record hidden states and attentions before a model is captured.

Its models set them at the first call that asks for such outputs, behind a lock that no trace can
take. If a capture fails there, a forward finds the models that ask, its state is restored, and they
get their hooks as their first call would set them. An idle hook does nothing.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any
from unittest import mock

from torch import nn

from memopt.step.inputs import Call
from memopt.user_code.restored_state import forward_restored

_HOME = "transformers.utils.output_capturing"


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
        elif not getattr(one, "_output_capturing_hooks_installed", False):
            asked.setdefault(id(one), one)

    with (
        mock.patch.object(home, "maybe_install_capturing_hooks", ask),
        contextlib.suppress(Exception),  # outputs that are not recorded may be missing
        forward_restored(model, call),
    ):
        pass
    for one in asked.values():
        home.maybe_install_capturing_hooks(one)
    return bool(asked)
