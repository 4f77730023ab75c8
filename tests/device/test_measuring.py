"""What memopt measures on a device: links, rates, kernels, memory, and recorded steps."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch

import memopt
from memopt.models.device import in_blocks
from memopt.pricing import device_measure
from memopt.pricing.measure import MeasureOptions, environment
from memopt.pricing.memory import metered
from memopt.profiler import Loss, profile_model
from memopt.report.lanes import Lane
from tests.device import accelerator
from tests.device.harness import delayed, net, settled, small_probes
from tests.device.test_plans import WAYS


def test_memory_of_a_block(device: torch.device) -> None:
    held = torch.empty(1000, dtype=torch.uint8, device=device)
    with delayed((500, 500)), metered(device) as use:
        one = torch.empty(1000, dtype=torch.uint8, device=device)
        two = torch.empty(5000, dtype=torch.uint8, device=device)
        elsewhere = torch.empty(9000, dtype=torch.uint8, device="fake:1")
        del two
    assert (use.peak_bytes, use.end_bytes) == (1024 + 5120, 1024)
    del held, one, elsewhere


def test_the_link_and_the_rates(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    small_probes(monkeypatch)
    torch.manual_seed(3)
    states = [accelerator.generator(number).get_state() for number in range(2)]
    held = torch.empty(3 * 2**20, dtype=torch.uint8, device="fake:1")
    found = memopt.measure_device("fake:1")
    assert (found.kind, found.block_bytes) == ("fake", 512)
    assert found.name == environment(torch.device("fake:1"))
    # What this process holds itself counts: other tests' tensors may be there, too.
    assert accelerator.mod.memory_allocated(1) >= held.nbytes
    assert found.capacity_bytes == 2**30
    rates = (found.to_host_bytes_per_s, found.swap_in_bytes_per_s, found.memory_bytes_per_s)
    assert all(0 < rate < math.inf for rate in (*rates, *found.flops_per_s.values()))
    assert found.host_update_bytes_per_s
    for state, number in zip(states, range(2), strict=True):
        assert torch.equal(state, accelerator.generator(number).get_state())
    assert memopt.measure_device().kind == "fake"  # the machine's accelerator, unasked


def test_the_unplanned_step_and_its_loss(device: torch.device) -> None:
    one = net(str(device))
    options = MeasureOptions(cap_s=0.5, max_rounds=2)
    with delayed((100, 100)):
        slow = profile_model(one.model, one.inputs, loss=Loss(one.loss), options=options)
    assert slow.baseline.measured
    one.begin()
    settled()
    before = accelerator.mod.memory_allocated()
    accelerator.mod.reset_peak_memory_stats()
    one.step()
    measured = accelerator.mod.max_memory_allocated() - before
    resident = slow.graph.resident_bytes
    assert slow.baseline.peak_bytes - resident == pytest.approx(measured, abs=4096)


@pytest.mark.parametrize("way", ["rotor", "offload"])
def test_a_recorded_step(way: str, device: torch.device, tmp_path: Path) -> None:
    one = net(str(device))
    plan = memopt.plan(one.profiled, progress=False, **WAYS[way])
    wanted = one.grads()
    with delayed((100, 300)):
        _, measured = plan.trace(tmp_path / "step.json", one.model, one.inputs, loss_fn=one.loss)
    for lane in (Lane.OUT, Lane.IN):
        spans = sorted((s for s in measured.spans if s.lane is lane), key=lambda s: s.start_s)
        assert bool(spans) == (way == "offload")
        ends = [one.end_s for one in spans]
        assert all(end <= s.start_s + 1e-4 for end, s in zip(ends, spans[1:], strict=False))
    check = plan.check(one.model, one.inputs, loss_fn=one.loss)
    # It holds no output, which the plan charges to the end of the step.
    assert check.measured_peak_bytes == pytest.approx(plan.peak_bytes, rel=0.02)
    assert check.measured_time_s > 0
    got = one.grads()
    assert all(a is b or torch.equal(a, b) for a, b in zip(got, wanted, strict=True))  # type: ignore[arg-type]


def test_a_link_used_both_ways_at_once(device: torch.device) -> None:
    """The directions overlap or take turns; what slows the slower one slows both."""
    at_once = device_measure.at_once
    assert at_once(2e9, 1e9, 1.5e-9) == (2e9, 1e9, False)
    assert at_once(2e9, 1e9, 1e-9) == (2e9, 1e9, True)
    assert at_once(2e9, 1e9, 1.1e-9) == pytest.approx((2e9 / 1.1, 1e9 / 1.1, True))


def test_updates_in_hooks_on_gradients_are_charged(device: torch.device) -> None:
    one = net(str(device), dropout=0.0)
    model = memopt.wrap(one.model, "min", "rotor", progress=False)
    optimizers = []
    for parameter in model.parameters():
        optimizers.append(torch.optim.AdamW([parameter], 1e-3, foreach=False))
        hook = partial(_update, optimizers[-1])
        parameter.register_post_accumulate_grad_hook(hook)
    inputs = torch.ones(2, 16, device=device)
    for _ in range(5):
        model(inputs).square().mean().backward()
    settled()
    there = accelerator.mod.memory_allocated()
    accelerator.mod.reset_peak_memory_stats()
    model(inputs).square().mean().backward()
    settled()
    states = [x for one in optimizers for state in one.state.values() for x in state.values()]
    held = [x for x in (*model.parameters(), *states, inputs) if x.device == device]
    rest = there - sum(in_blocks(x.nbytes, 512) for x in held)
    assert accelerator.mod.max_memory_allocated() - rest <= model.plans[-1].budget


def _update(optimizer: torch.optim.Optimizer, _parameter: torch.Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()
