"""Random cost models, devices and what may be done to them without changing what is best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.generate import random_chain, random_graph
from memopt.models.graph import Graph
from memopt.strategies.base import CostModel
from tests.brute_force.tiny_graphs import tiny_graph

KINDS = ("drawn", "drawn", "drawn", "extreme times", "extreme sizes", "no times", "no sizes")
LONGEST_CHAIN = 7
"""Stages: what the exhaustive search of chains takes."""


@dataclass(frozen=True)
class Instance:
    """A cost model and the device that it is planned for.

    Attributes:
        label: what it was drawn from.
        model: what is planned.
        device: link rates.
        searched: small enough for exhaustive search, and of whole seconds.
    """

    label: str
    model: CostModel
    device: Device
    searched: bool


def instance(seed: int) -> Instance:
    """The instance of a seed: a chain or a graph, as drawn or with extreme figures."""
    dice = Random(f"instance {seed}")
    kind = dice.choice(KINDS)
    model = _chain(dice, kind) if dice.random() < 0.55 else _graph(dice)
    if kind == "extreme times":
        model = with_figures(model, time=remembered(lambda _: 10 ** dice.uniform(-12, 6)))
    elif kind == "extreme sizes":
        model = with_figures(model, size=remembered(lambda _: 2 ** dice.randint(0, 40)))
    elif kind == "no times":
        model = with_figures(model, time=lambda _: 0.0)
    elif kind == "no sizes":
        model = with_figures(model, size=lambda _: 0)
    whole = kind in ("drawn", "no times", "no sizes")
    return Instance(f"{kind} {seed}", model, _device(dice), whole)


def _chain(dice: Random, kind: str) -> Chain:
    length = dice.choice((1, dice.randint(1, 5), dice.randint(2, LONGEST_CHAIN)))
    return random_chain(
        dice,
        length,
        parameter_gradients=dice.random() < 0.5,
        negative_overheads=kind == "drawn" and dice.random() < 0.3,
        resident_bytes=dice.choice((0, 5)),
    )


def _graph(dice: Random) -> Graph:
    if dice.random() < 0.5:
        return tiny_graph(dice)
    return random_graph(
        dice,
        dice.randint(1, 5),
        implementations=dice.random() < 0.3,
        inference=dice.random() < 0.1,
        updates=dice.random() < 0.2,
    )


def _device(dice: Random) -> Device:
    return dice.choice(
        (
            Device(to_host_bytes_per_s=5.0),
            Device(to_host_bytes_per_s=5.0, from_host_bytes_per_s=0.5, transfer_latency_s=0.3),
            Device(to_host_bytes_per_s=2.0, duplex=False),
            Device(to_host_bytes_per_s=2e-3),  # `slower` divides it by 2**20; 1e-9 is the least
            Device(to_host_bytes_per_s=1e15, transfer_latency_s=1e-6),
            Device(),
        )
    )


def remembered(draw: Callable[[float], float]) -> Callable[[float], float]:
    """Equal figures stay equal; 0 stays 0."""
    known: dict[float, float] = {0: 0}

    def figure(value: float) -> float:
        if value not in known:
            known[value] = draw(value)
        return known[value]

    return figure


def with_figures(
    model: CostModel,
    *,
    time: Callable[[float], float] = lambda seconds: seconds,
    size: Callable[[int], float] = lambda size_bytes: size_bytes,
    name: Callable[[str], str] = lambda name: name,
) -> CostModel:
    """The model with every time, every size and every name changed."""

    def of(value: int) -> int:
        return int(size(value))

    if isinstance(model, Chain):
        stages = [
            replace(
                stage,
                forward_time_s=time(stage.forward_time_s),
                backward_time_s=time(stage.backward_time_s),
                output_bytes=of(stage.output_bytes),
                saved_bytes=of(stage.saved_bytes),
                gradient_bytes=of(stage.gradient_bytes),
                forward_overhead_bytes=of(stage.forward_overhead_bytes),
                forward_no_save_overhead_bytes=of(stage.no_save_overhead_bytes),
                backward_overhead_bytes=of(stage.backward_overhead_bytes),
                parameter_gradient_bytes=of(stage.parameter_gradient_bytes),
                name=name(stage.name),
            )
            for stage in model.stages
        ]
        sizes = model.input_bytes, model.resident_bytes, model.input_gradient_bytes
        first, resident, gradient = map(of, sizes)
        return Chain(first, stages, resident, gradient)
    operators = [
        replace(
            one,
            name=name(one.name),
            time_s=time(one.time_s),
            workspace_bytes=of(one.workspace_bytes),
            implementations=tuple(
                replace(way, time_s=time(way.time_s), workspace_bytes=of(way.workspace_bytes))
                for way in one.implementations
            ),
        )
        for one in model.operators
    ]
    tensors = [
        replace(one, name=name(one.name), size_bytes=of(one.size_bytes)) for one in model.tensors
    ]
    return replace(
        model,
        tensors=tensors,
        operators=operators,
        boundary_bytes=of(model.boundary_bytes),
        extra_resident_bytes=of(model.extra_resident_bytes),
    )


def slower(device: Device, factor: float) -> Device:
    """The device for a model whose every time is `factor` times as long."""
    rates = device.to_host_bytes_per_s / factor, device.swap_in_bytes_per_s / factor
    return _linked(device, rates, device.transfer_latency_s * factor)


def wider(device: Device, factor: int) -> Device:
    """The device for a model whose every size is `factor` times as large."""
    rates = device.to_host_bytes_per_s * factor, device.swap_in_bytes_per_s * factor
    return _linked(device, rates, device.transfer_latency_s)


def _linked(device: Device, rates: tuple[float, float], latency_s: float) -> Device:
    return replace(
        device,
        to_host_bytes_per_s=rates[0],
        from_host_bytes_per_s=rates[1],
        transfer_latency_s=latency_s,
    )
