"""Offloaded steps on a device as users run them: on CPU here, and on a GPU where there is one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import memopt
from benchmarks.gpu.offload import limited, reserved_bytes, total_peak_of
from benchmarks.gpu.subject import standing_bytes, stepper
from memopt.profiler import Loss, profile_model
from memopt.report.lanes import Lane
from memopt.step.backend import backend_of
from tests.zoo import get
from tests.zoo.family import TINY_BATCH

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROUNDING_BYTES = 4 * 2**20
"""The last segments of the small and the large pool, of what was there before the model."""
TIME_TOLERANCE = 0.10
CLOCK_S = 2e-6
"""CUDA's event times are exact to about half a microsecond, each."""
CUDA_BATCHES = {"resnet50": 64, "gpt2": 16}
"""Enough work that a step's time is its kernels' and copies', as predictions say."""


def promised_bytes(plan: memopt.Plan) -> int:
    """Give the peak that a plan promises: its budget; on CUDA what the simulated allocator counts
    for it, where blocks that are not split (without expandable segments) count whole."""
    assert plan.budget is not None
    found = plan.reserved
    return max(plan.budget, found.allocated_peak_bytes if found else 0)


def to(device: torch.device, value: Any) -> Any:
    move = partial(torch.Tensor.to, device=device)
    return pytree.tree_map(lambda x: move(x) if isinstance(x, torch.Tensor) else x, value)


@pytest.mark.parametrize("device_name", DEVICES)
@pytest.mark.parametrize("name", [pytest.param("resnet50", marks=pytest.mark.slow), "gpt2"])
def test_peak_gradients_and_time(name: str, device_name: str) -> None:
    """Peak within the budget, enforced; gradients eager's; on CUDA the time as predicted."""
    device = torch.device(device_name)
    family = get(name)
    before_bytes = standing_bytes(device)
    cuda = device.type == "cuda"
    model = family.build("paper" if cuda else "tiny").to(device)
    batch = CUDA_BATCHES[name] if cuda else TINY_BATCH
    inputs = to(device, family.inputs("paper" if cuda else "tiny", batch=batch))
    link = memopt.measure_device(device)
    profiled = profile_model(model, inputs, loss=Loss(family.loss))
    plan = memopt.plan(
        profiled, budget="min", strategy="offload-graph", device=link, progress=False
    )
    assert plan.budget is not None
    assert plan.host_peak_bytes > 0
    # On the host: nothing but the step may take device memory below.
    state = {key: value.cpu().clone() for key, value in model.state_dict().items()}
    steps = {}
    gradients = {}
    ways = {"eager": model, "eager again": model, "memopt": plan.apply(model)}
    for way, module in ways.items():
        model.load_state_dict(state)
        steps[way] = stepper(family, module, inputs, torch.enable_grad)
        torch.manual_seed(0)
        steps[way]()
        found = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
        gradients[way] = to(torch.device("cpu"), found)
        del found
        model.zero_grad(set_to_none=True)
    for key, expected in gradients["eager"].items():
        found = gradients["memopt"][key]
        if not cuda:
            assert torch.equal(found, expected)
            continue
        # Some of CUDA's kernels add in any order: eager's own second run says how far that goes.
        scale = max(float(expected.abs().max()), 1e-12)
        noise = float((gradients["eager again"][key] - expected).abs().max()) / scale
        assert float((found - expected).abs().max()) / scale <= max(1e-4, 10 * noise)
    resident_bytes = plan.resident_bytes - backend_of(device).step_scalars_bytes
    with limited(device, before_bytes + ROUNDING_BYTES + reserved_bytes(plan)):
        measured = total_peak_of(model, steps["memopt"], device, resident_bytes, before_bytes)
    assert measured <= promised_bytes(plan)
    if cuda:
        check = plan.check(model, inputs, loss_fn=family.loss)
        assert check.measured_time_s == pytest.approx(plan.step_time_s, rel=TIME_TOLERANCE)


@pytest.mark.parametrize("device_name", DEVICES)
def test_a_recorded_step(device_name: str, tmp_path: Any) -> None:
    """Copies and waits are recorded on every device; copies of one direction do not overlap."""
    device = torch.device(device_name)
    family = get("gpt2")
    model = family.build("tiny").to(device)
    plan = memopt.plan(
        model,
        to(device, family.inputs("tiny")),
        budget="min",
        strategy="offload-graph",
        device=memopt.measure_device(device),
        progress=False,
    )
    _, measured = plan.trace(tmp_path / "step.json", model)
    for lane in (Lane.OUT, Lane.IN):
        spans = sorted((s for s in measured.spans if s.lane is lane), key=lambda s: s.start_s)
        assert spans
        ends = [s.end_s for s in spans]
        assert all(end <= s.start_s + CLOCK_S for end, s in zip(ends, spans[1:], strict=False))


@pytest.mark.parametrize("device_name", DEVICES)
def test_optimizer_state_on_the_host(device_name: str) -> None:
    """As on the device, to the last bit, where the kernels are the same."""
    device = torch.device(device_name)
    results = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        x = torch.randn(32, 64, device=device)
        y = torch.randint(0, 8, (32,), device=device)
        plan = memopt.plan(
            model,
            x,
            loss_fn=nn.functional.cross_entropy,
            targets=(y,),
            optimizer=optimizer,
            strategy="olla",
            whole_step=True,
            offload_optimizer=offloaded,
            cache=False,
            progress=False,
        )
        step = plan.train_step(model, nn.functional.cross_entropy, optimizer)
        for _ in range(3):
            step(x, targets=(y,))
        if offloaded:
            for parameter_state in optimizer.state.values():
                assert parameter_state["exp_avg"].device.type == "cpu"
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *results))
