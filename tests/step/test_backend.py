"""Rows of the table of devices, and what differs with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import memopt
from memopt.step.backend import BACKENDS, backend_of, estimated_backend

LINK = memopt.Device(to_host_bytes_per_s=1e9)


def test_where_memory_is_the_hosts_nothing_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "cpu", replace(BACKENDS["cpu"], copies=False))
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh())))
    x = torch.randn(64, 32)
    with pytest.raises(ValueError, match=r"frees nothing.*strategy=\"rotor\""):
        memopt.plan(model, x, strategy="offload-graph", budget="min", device=LINK, progress=False)
    assert memopt.plan(model, x, strategy="rotor", budget="min", progress=False).budget


def test_rows() -> None:
    assert backend_of(torch.device("xpu", 1)).kind == "xpu"
    assert backend_of("cuda:1").runtime.kind == "cuda"
    assert backend_of("cpu").runtime is None
    assert not backend_of("mps").copies


def test_an_estimate_goes_by_the_devices_kind() -> None:
    assert estimated_backend(1).kind == "cpu"
    assert estimated_backend(512).kind == "cuda"
    assert estimated_backend(512, "xpu").kind == "xpu"
    with pytest.raises(ValueError, match="'tpu'"):
        estimated_backend(512, "tpu")
    model, x = nn.Linear(64, 64), torch.randn(8, 64)
    h100 = memopt.Device(flops_per_s={"float32": 1e13}, block_bytes=512, name="H100")
    cuda, xpu = (
        memopt.plan(
            model, x, mode="estimate", device=replace(h100, kind=kind), progress=False
        ).resident_bytes
        for kind in ("cuda", "xpu")
    )
    assert (
        cuda - xpu == 2 * 2**25
    )  # cuBLAS's workspaces, of the forward's and the backward's thread
