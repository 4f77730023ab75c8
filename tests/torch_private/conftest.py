"""What was found with a name hidden is forgotten."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.torch_private.hiding import forget


@pytest.fixture(autouse=True)
def _looked_up_again() -> Iterator[None]:
    yield
    forget()
