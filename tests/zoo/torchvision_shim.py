"""Lets `import torchvision` work where its compiled operators cannot be loaded.

torchvision's package on PyPI is compiled for the CUDA build of torch. Beside a CPU build its model
definitions are plain Python and fine, but importing it fails, as it registers fake kernels for two
compiled operators that then do not exist. Declaring these two is enough. Import this module before
torchvision.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_declared: list[torch.library.Library] = []


def _compiled_operators_load() -> bool:
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("torchvision is missing: pip install --no-deps torchvision")
    for path in Path(found.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(path)
        except OSError:
            continue
        return True
    return False


def declare_missing_operators() -> None:
    """Declare torchvision's nms operators, once, if its own library cannot."""
    if _declared or _compiled_operators_load():
        return
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define(
        "qnms(Tensor dets, Tensor scores, float iou_threshold, float scale, int zero_point)"
        " -> Tensor"
    )
    _declared.append(library)


declare_missing_operators()
