"""What the cells measure: a family's model, on a machine."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import memopt
from benchmarks.steps import clear, gradients
from memopt.pricing.memory import library_bytes
from memopt.profiler import Loss, MeasureOptions, profile_model
from memopt.step.backend import backend_of
from memopt.step.profiled import Profiled
from tests.zoo import Family, call, get
from tests.zoo.family import TINY_BATCH

DRY = {"resnet50": "mlp", "vit_b_16": "mlp", "unet": "mlp"}
"""What stands for a family in a dry run: its lines, not its figures, are what is run there."""


@dataclass(frozen=True)
class Row:
    """One figure beside what it should be. verdict: "ok", "no", or what there is to read."""

    cell: str
    subject: str
    what: str
    expected: str
    found: str
    verdict: str


@dataclass(frozen=True)
class Machine:
    """Where it runs, and how large: "paper" on a GPU, "tiny" in a dry run on the CPU."""

    device: torch.device
    size: Any
    rounds: int

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def limit_s(self) -> float | None:
        """Give the seconds of a solver; None: its own."""
        return None if self.is_cuda else 1.0

    def move(self, value: Any) -> Any:
        to = partial(torch.Tensor.to, device=self.device)
        return pytree.tree_map(lambda x: to(x) if isinstance(x, Tensor) else x, value)


def standing_bytes(device: torch.device) -> int:
    """Measure what a device has allocated before a model comes, without workspaces; 0 on CPU."""
    runtime = backend_of(device).runtime
    if runtime is None:
        return 0
    gc.collect()
    library_bytes(device)
    return int(runtime.memory_allocated(device))


def stepper(family: Family, module: nn.Module, inputs: Any, around: Callable[[], Any]) -> Any:
    """Make one forward, loss and backward inside a context."""

    def step() -> None:
        with around():
            family.loss(call(module, inputs)).backward()

    return step


@dataclass
class Subject:
    """A family's model on the machine."""

    family: Family
    model: nn.Module
    inputs: Any
    before_bytes: int
    profiled: Profiled = field(repr=False)

    @classmethod
    def of(cls, name: str, machine: Machine, batch: int, dropout: bool = True) -> Subject:
        """Build and profile a family's model, with its dropout or without."""
        family = get(name if machine.is_cuda else DRY.get(name, name))
        before_bytes = standing_bytes(machine.device)
        model = family.build(machine.size).to(machine.device)
        for module in model.modules():
            if isinstance(module, nn.Dropout) and not dropout:
                module.p = 0.0
        batch = batch if machine.is_cuda else TINY_BATCH
        inputs = machine.move(family.inputs(machine.size, batch=batch))
        # In a dry run kernels are measured a few times, for its lines alone.
        how = MeasureOptions(cap_s=0.2, max_rounds=2)
        how = how if machine.size == "tiny" else MeasureOptions()
        profiled = profile_model(model, inputs, loss=Loss(family.loss), options=how)
        return cls(family, model, inputs, before_bytes, profiled)

    def plan(self, strategy: str = "rotor", budget: Any = None, **how: Any) -> memopt.Plan:
        """Plan the step as it was profiled."""
        how |= {"strategy": strategy, "budget": budget, "progress": False}
        return memopt.plan(self.profiled, **how)

    def above(self, floor: memopt.Plan, share: float) -> int:
        """Give the budget that is so far from a plan's peak to the unplanned step's."""
        room = max(0, self.profiled.baseline.peak_bytes - floor.peak_bytes)
        return floor.peak_bytes + int(share * room)

    def step(self, module: nn.Module) -> Callable[[], None]:
        return stepper(self.family, module, self.inputs, torch.enable_grad)

    def gradients(self, module: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Give the gradients of a step from a state, on the host."""
        self.model.load_state_dict(state)
        clear(self.model)
        torch.manual_seed(0)
        self.step(module)()
        found = {name: grad.cpu() for name, grad in gradients(self.model).items()}
        clear(self.model)
        return found
