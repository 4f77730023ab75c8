"""Which names code that runs after the trace may read."""

from __future__ import annotations

import os
import types

import pytest
import torch
from torch import nn

from memopt.step.late import late_names

PACKAGES = os.path.dirname(os.path.dirname(torch.__file__))


@pytest.mark.parametrize(
    ("package", "is_torchs"), [("torch", True), ("torch_scatter", False), ("torchvision", False)]
)
def test_only_torchs_own_code_sets_no_hooks(package: str, is_torchs: bool) -> None:
    path = os.path.join(PACKAGES, package, "functional.py")
    module = compile("def forward(x):\n    x.register_hook(scaled)", path, "exec")
    code = next(one for one in module.co_consts if isinstance(one, types.CodeType))
    assert (late_names(nn.Linear(1, 1), [code]) is not None) == is_torchs
