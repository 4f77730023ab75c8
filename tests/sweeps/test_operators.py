"""Operators in layouts under plans: eager's bits, and never more memory than the budget."""

from __future__ import annotations

import pytest

from tests.sweeps.subjects import LAYOUTS
from tests.sweeps.sweep import TABLE, apart, findings

SAMPLE = [
    ("softplus", "permuted"),
    ("logsigmoid", "transposed"),
    ("softshrink", "contiguous"),
    ("addcmul_", "slice"),
    ("mse_loss mean", "transposed"),
    ("smooth_l1_loss none", "permuted"),
    ("kl_div batchmean", "expanded"),
    ("copysign", "channels_last"),
    ("prod -1", "slice"),
    ("prod 1", "channels_last"),
    ("batch_norm of a sequence", "contiguous"),
    ("batch_norm 1d rows", "transposed"),
    ("svdvals detached", "transposed"),
    ("eigvalsh constant", "contiguous"),
    ("matmul", "expanded"),
    ("linear shared three", "slice"),
]

CASES = [(name, layout) for name in TABLE for layout in LAYOUTS]
TOGETHER = 48


def test_a_sample() -> None:
    assert findings(SAMPLE) == []


def test_the_table_is_large() -> None:
    assert len(TABLE) >= 400
    assert set(LAYOUTS) >= {"contiguous", "transposed", "slice", "permuted", "expanded"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, len(CASES), TOGETHER))
def test_all(first: int) -> None:
    wrong = {case: found for case, found in apart(CASES[first : first + TOGETHER]) if found}
    assert wrong == {}
