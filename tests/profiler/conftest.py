"""What tests of joint graphs share."""

from __future__ import annotations

import pytest

from memopt.profiler import joint_cache
from tests.profiler.kept_joints import Reads


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    monkeypatch.setattr(joint_cache, "FEWEST_NODES", 0)
    return Reads(monkeypatch)
