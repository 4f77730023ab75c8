"""Work of kernel calls by hand, and against torch's own flop counter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from memopt.models.device import Device
from memopt.pricing.flops import Work, work
from memopt.pricing.roofline import work_time_s
from memopt.step.signature import Signature, TensorArgument, describe_value

aten = torch.ops.aten
SHAPE: list[Any] = [[1, 1], [1, 1], [1, 1], False, [0, 0]]


def work_of(target: Any, *args: Any, **kwargs: Any) -> Work:
    call = Signature(target, describe_value(args), describe_value(kwargs), "")
    return work(call, describe_value(target(*args, **kwargs)))


def image(channels: int = 32) -> torch.Tensor:
    return torch.rand(2, channels, 8, 8)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.mm.default, (torch.rand(64, 96), torch.rand(96, 128))),
        (aten.bmm.default, (torch.rand(3, 64, 96), torch.rand(3, 96, 128))),
        (aten.addmm.default, (torch.rand(64), torch.rand(32, 64), torch.rand(64, 64))),
        (aten.convolution.default, (image(), torch.rand(16, 32, 3, 3), None, *SHAPE, 1)),
        (
            aten.convolution_backward.default,
            (image(16), image(), torch.rand(16, 32, 3, 3), [0], *SHAPE, 1, [True, True, False]),
        ),
        (
            aten.convolution_backward.default,
            (image(16), image(), torch.rand(16, 32, 3, 3), [0], *SHAPE, 1, [False, True, False]),
        ),
        (
            aten.convolution.default,
            (image(), torch.rand(32, 8, 2, 2), None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1),
        ),
    ],
)
def test_operations_are_torchs(target: Any, args: tuple[Any, ...]) -> None:
    with FlopCounterMode(display=False) as counter:
        target(*args)
    assert work_of(target, *args).operations == counter.get_total_flops()


def test_small_products_are_padded_to_tiles() -> None:
    outer = work_of(aten.mm.default, torch.rand(256, 2), torch.rand(2, 64))
    assert outer.operations == 2 * 256 * 32 * 64
    assert outer.moved_bytes == 4 * (256 * 2 + 2 * 64 + 256 * 64)


def test_attention_counts_two_products_forward_and_five_backward() -> None:
    heads = [torch.rand(2, 4, 64, 16) for _ in range(3)]
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    product = 2.0 * 2 * 4 * 64 * 64 * 16
    assert work_of(forward, *heads).operations == 2 * product
    assert work_of(forward, *heads, 0.0, True).operations == product
    out, sums = forward(*heads)
    assert work_of(backward, out, *heads, out, sums, 0.0, False).operations == 5 * product
    assert work_of(forward, *heads).kind == "attention"


def test_bytes_of_views_are_what_is_behind_them() -> None:
    wide = torch.rand(8, 1).expand(8, 1000)
    added = work_of(aten.add.Tensor, wide, wide)
    assert added.moved_bytes == 4 * (8 + 8 + 8000) or added.moved_bytes == 4 * (8 + 8000)
    table = torch.rand(10_000, 16)
    looked_up = work_of(aten.embedding.default, table, torch.zeros(4, dtype=torch.long))
    assert looked_up.moved_bytes == 2 * 4 * 4 * 16 + 4 * 8


def test_depthwise_and_pooling_are_kinds_of_their_own() -> None:
    depthwise = work_of(
        aten.convolution.default, image(), torch.rand(32, 1, 3, 3), None, *SHAPE, 32
    )
    assert (depthwise.kind, depthwise.operations) == ("depthwise", 2.0 * 2 * 32 * 64 * 9)
    pooled = work_of(aten.max_pool2d_with_indices.default, image(), [2, 2], [2, 2])
    assert (pooled.kind, pooled.operations) == ("pool", 2.0 * 32 * 16 * 4)


DEVICE = Device(
    name="test",
    flops_per_s={"float32": 1e9, "float32 softmax": 1e6},
    memory_bytes_per_s=1e8,
    launch_latency_s=1e-3,
    flops_fraction=0.5,
    memory_fraction=0.5,
)


@pytest.mark.parametrize(
    ("done", "expected"),
    [
        (Work("", "float32", 5e8, 0), 1e-3 + 1.0),
        (Work("", "float32", 1e3, 50_000_000), 1e-3 + 1.0),
        (Work("element", "float32", 0.0, 0, calls=3), 3e-3),
        # An entry for the kind is what is achieved: no fraction.
        (Work("softmax", "float32", 1e6, 8), 1e-3 + 1.0),
        (Work("tanh", "float32", 1e12, 50_000_000), 1e-3 + 1.0),
    ],
)
def test_roofline(done: Work, expected: float) -> None:
    assert work_time_s(done, DEVICE) == pytest.approx(expected)


def test_products_hide_neither_all_arithmetic_nor_all_memory() -> None:
    device = replace(DEVICE, product_exposure=3.0)
    for operations, moved in ((5e8, 25_000_000), (2.5e8, 50_000_000)):
        done = Work("", "float32", operations, moved)
        assert work_time_s(done, device) == pytest.approx(1e-3 + 1.0 + 3 * 0.5)
    assert work_time_s(Work("softmax", "float32", 1e6, 25_000_000), device) == 1e-3 + 1.0


@pytest.mark.parametrize(("rows", "share"), [(50304, 1.0), (50257, 0.4)])
def test_half_precision_waits_for_rows_that_begin_anywhere(rows: int, share: float) -> None:
    given, weight = (torch.empty(8, 64, dtype=torch.bfloat16), torch.empty(rows, 64))
    done = work_of(aten.mm.default, given, weight.to(torch.bfloat16).t())
    device = Device(flops_per_s={"bfloat16": 1e9, "float32": 1e9}, block_bytes=512)
    assert work_time_s(done, device) == pytest.approx(done.operations / 1e9 / share)
    assert work_time_s(replace(done, dtype="float32"), device) == done.operations / 1e9


def test_a_dtype_without_a_rate_is_named() -> None:
    with pytest.raises(ValueError, match=r"no flops_per_s for 'bfloat16'.*it has: float32"):
        work_time_s(Work("", "bfloat16", 1.0, 1), DEVICE)


def test_convolutions_take_tf32_where_there_is_any() -> None:
    device = Device(flops_per_s={"float32": 1e9, "tfloat32": 1e10})
    assert work_time_s(Work("convolution", "float32", 1e10, 0), device) == pytest.approx(1.0)
    assert work_time_s(Work("", "float32", 1e10, 0), device) == pytest.approx(10.0)


def test_described_tensors() -> None:
    described = describe_value([torch.rand(2, 3), None, 4])
    assert isinstance(described[0], TensorArgument)
    assert described[1:] == [None, 4]
