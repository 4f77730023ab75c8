"""The GPUs of the published rows, and the rates of the kernels that they ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memopt.models.device import Device
from memopt.models.presets import find_device

_A100, _H100 = find_device("A100"), find_device("H100")
DEVICES: dict[str, Device] = {
    **{name: find_device(name) for name in ("H100", "H200", "GB200")},
    "A100-80GB": _A100,
    "A100-40GB": replace(_A100, name="A100-SXM-40GB", memory_bytes_per_s=1555e9),
    "A100-40GB-PCIe": replace(_A100, name="A100-PCIe-40GB", memory_bytes_per_s=1555e9),
    "H100-96GB-500W": replace(
        _H100,
        name="H100-96GB-500W",
        capacity_bytes=int(93.6 * 2**30),
        memory_bytes_per_s=2400e9,
        flops_fraction=0.78,
        memory_fraction=0.92,
        source="torchtitan's description of its machines; shares of the rates as in torchao's",
    ),
}
"""torchtitan's H100s have HBM2e and 500 W. torchao's roofline of them (float8/roofline_utils.py)
has 92% of the memory's rate, and of 989 tera-operations per second 78% (d8af7d7, March 2025)."""
_FIRST_FLASH = 0.325 / 0.62
"""What the first FlashAttention reaches of the second's rate: 25 to 40% of an A100's arithmetic
beside 50 to 73% (arXiv:2307.08691, abstract; the presets have 62%)."""
MEMORY_ONLY = {"A10G": replace(_A100, name="A10G")}
"""GPUs whose times nobody published: only peaks are estimated."""
ALL_DEVICES = DEVICES | MEMORY_ONLY


def device_of(row: Mapping[str, Any]) -> Device:
    """Return the GPU, with the rate of the attention kernel that the row was run with."""
    device = ALL_DEVICES[row["gpu"]]
    if row.get("attention") != "first flash":
        return device
    slower = {k: v * _FIRST_FLASH for k, v in device.flops_per_s.items() if "attention" in k}
    return replace(device, flops_per_s={**device.flops_per_s, **slower})
