"""The accelerator is what its docstring says, seen through torch's own interface."""

from __future__ import annotations

import ctypes
import os
import signal
import time

import torch

from tests.device import accelerator


def test_host_access_to_device_memory_ends_the_process(device: torch.device) -> None:
    child = os.fork()
    if not child:
        ctypes.string_at(torch.ones(4, device=device).data_ptr(), 4)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


def test_work_is_queued(device: torch.device) -> None:
    x = torch.randn(64, 64, device=device)
    accelerator.delay(20000)
    begin = time.perf_counter()
    for _ in range(10):
        x = x @ x
    queued_s = time.perf_counter() - begin
    accelerator.mod.synchronize()
    assert time.perf_counter() - begin > 2 * queued_s
