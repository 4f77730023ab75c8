"""What tests of one rank share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@pytest.fixture
def alone() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()
