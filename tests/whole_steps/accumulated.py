"""A small model whose planned step adds up micro-batches, clips and scales, beside eager's loop."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import memopt
from memopt.executor.train_step import TrainStep
from memopt.pricing.memory import metered
from memopt.step.backend import backend_of
from tests.whole_steps.test_train_step import assert_same

CPU = torch.device("cpu")
LINK = memopt.Device(to_host_bytes_per_s=5e9)


class Net(nn.Module):
    """Convolution, statistics, dropout, a matrix used twice, and a parameter that is not trained
    and one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.twice = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x))).mean((2, 3)) * self.frozen
        x = torch.tanh(self.twice(nn.functional.dropout(torch.tanh(self.twice(x)), 0.2)))
        found: Tensor = self.head(x)
        return found


def images(number: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches for `Net`."""
    random = torch.Generator().manual_seed(number)
    return [
        (torch.randn(4, 3, 8, 8, generator=random), torch.randint(0, 5, (4,), generator=random))
        for _ in range(count)
    ]


def deep(width: int = 64, depth: int = 12) -> nn.Module:
    """Many layers of one size: the largest takes little beside all of them."""
    sizes = [64, *[width] * depth]
    hidden = [m for i in range(depth) for m in (nn.Linear(*sizes[i : i + 2]), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Dropout(0.1), nn.BatchNorm1d(width), nn.Linear(width, 10))


def rows(number: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches for `deep`."""
    random = torch.Generator().manual_seed(number)
    return [
        (torch.randn(8, 64, generator=random), torch.randint(0, 10, (8,), generator=random))
        for _ in range(count)
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([*model.parameters()][::-1], lr=0.1, momentum=0.9)


def check_equal(found: Any, wanted: Any) -> None:
    """Bitwise equality of nested states, in which what is not a number equals itself."""
    for one, other in zip(
        *(pytree.tree_map_only(Tensor, torch.nan_to_num, value) for value in (found, wanted)),
        strict=True,
    ):
        assert_same(one, other)


class Pair:
    """A model with its planned step, and eager's twin."""

    def __init__(
        self,
        micro_batches: int = 1,
        clip_norm: float | None = None,
        norm_type: float = 2.0,
        scale: float | None = None,
        make: Any = Net,
        batches: Any = images,
        optimizer: Any = adamw,
        strategy: str = "store-all",
        undo: bool = False,
        interpreted: bool = False,
        share: float | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model, self.batches = make(), batches
        self.loss = nn.functional.cross_entropy
        self.twin = copy.deepcopy(self.model)
        self.count, self.clip_norm, self.norm_type = micro_batches, clip_norm, norm_type
        self.optimizer, self.eager = optimizer(self.model), optimizer(self.twin)
        self.scaler = None if scale is None else self._scaler(scale, True)
        self.twin_scaler = self._scaler(scale or 1.0, scale is not None)
        self.states_bytes = 4 * sum(p.nbytes for p in self.model.parameters())
        if share is not None:
            options |= {"movable": "all", "budget": int(share * self.states_bytes)}
            options = {"strategy": "offload-graph", "device": LINK, **options}
        x, y = batches(0, 1)[0]
        self.plan = memopt.plan(
            self.model,
            x,
            loss_fn=self.loss,
            targets=(y,),
            optimizer=self.optimizer,
            micro_batches=micro_batches,
            clip_norm=clip_norm,
            norm_type=norm_type,
            scaler=self.scaler,
            progress=False,
            **{"strategy": strategy, **options},
        )
        how = {"undo": undo, "interpreted": interpreted}
        self.step = self.made(self.plan, **how)

    def _scaler(self, scale: float, enabled: bool) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", scale, growth_interval=2, enabled=enabled)

    def made(self, plan: memopt.Plan, **how: Any) -> TrainStep:
        return plan.train_step(self.model, self.loss, self.optimizer, scaler=self.scaler, **how)

    def run(self, data: list[tuple[Tensor, Tensor]], seed: int = 1) -> Tensor:
        """A planned step."""
        torch.manual_seed(seed)
        return self.step.accumulate(data)

    def expected(self, data: list[tuple[Tensor, Tensor]], seed: int = 1) -> tuple[Tensor, Any]:
        """Eager's loop: the losses, and the norm."""
        torch.manual_seed(seed)
        losses, norm, scaler = [], None, self.twin_scaler
        for x, y in data:
            loss = self.loss(self.twin(x), y)
            losses.append(loss.detach())
            scaler.scale(loss / self.count if self.count > 1 else loss).backward()
        scaler.unscale_(self.eager)
        if self.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.twin.parameters(), self.clip_norm, self.norm_type)
        scaler.step(self.eager)
        scaler.update()
        self.eager.zero_grad()
        return torch.stack(losses), norm

    def check_steps(self, numbers: Any) -> None:
        """Planned steps equal eager's, bit for bit; in step 2 a gradient overflows."""
        for number in numbers:
            data = self.batches(number, self.count)
            if number == 2 and self.scaler is not None:
                data[-1][0].fill_(math.nan)
            losses = self.run(data, number)
            expected, norm = self.expected(data, number)
            check_equal([losses], [expected])
            assert self.step.skipped == (number == 2 and self.scaler is not None)
            if norm is not None:
                check_equal([self.step.gradient_norm], [norm])
            self.check_same()

    def check_same(self) -> None:
        check_equal(self.everything(), self.everything(twin=True))

    def everything(self, *, twin: bool = False) -> Any:
        """Copies of all that a step changes."""
        model, optimizer = (self.twin, self.eager) if twin else (self.model, self.optimizer)
        scaler = self.twin_scaler if twin else self.scaler
        scales = {} if scaler is None else scaler.state_dict()
        return copy.deepcopy((model.state_dict(), optimizer.state_dict(), scales))

    def put(self, before: Any) -> None:
        """Be again what `everything` has copied."""
        own, state, scales = copy.deepcopy(before)
        self.model.load_state_dict(own)
        self.optimizer.load_state_dict(state)
        if self.scaler is not None:
            self.scaler.load_state_dict(scales)

    def metered_peak(self, steps: int = 1) -> int:
        """The measured peak of steps, as the plan counts it. What is there when the first of them
        begins is not counted."""
        data = self.batches(9, self.count)
        with metered(CPU) as use:
            for _ in range(steps):
                self.run(data)
        for _ in range(steps):
            self.expected(data)
        return self.plan.resident_bytes - backend_of(CPU).step_scalars_bytes + use.peak_bytes
