"""What a training consists of at one moment, and what must hold after a fault in a step."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memopt.executor import random_state
from memopt.pricing.memory import metered
from tests.executor.harness import is_generator_free
from tests.whole_steps.test_train_step import assert_same

CPU = torch.device("cpu")


@dataclass(frozen=True)
class State:
    """Copies of a training's state.

    Attributes:
        trained: parameters and optimizer state.
        moved: buffers and random state, which the forward moves.
    """

    trained: Any
    moved: Any

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer) -> State:
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        state = copy.deepcopy(optimizer.state_dict())
        return cls((parameters, state), (buffers, torch.get_rng_state()))

    def into(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Put a training where this one is."""
        model.load_state_dict({**self.trained[0], **self.moved[0]})
        optimizer.load_state_dict(copy.deepcopy(self.trained[1]))
        torch.set_rng_state(self.moved[1])


def same(found: Any, expected: Any) -> bool:
    """Whether nested states are equal, bit for bit."""
    try:
        assert_same(found, expected)
    except AssertionError:
        return False
    return True


@dataclass
class Subject:
    """A planned training beside the same in eager.

    Attributes:
        model, optimizer: what is trained.
        step: a step under the plan, updates included; its loss and gradients.
        eager: the same for any model and optimizer, without a plan.
        host_bytes: host memory of copies now.
        waiting: steps whose backward has not come.
        renewed_bytes: what a step makes anew, and lets go of from the step before, which the meter
            does not see.
    """

    model: nn.Module
    optimizer: Optimizer
    step: Callable[[], list[Tensor]]
    eager: Callable[[nn.Module, Optimizer], list[Tensor]]
    host_bytes: Callable[[], int]
    waiting: Callable[[], int]
    renewed_bytes: int = 0

    def __post_init__(self) -> None:
        self.twin = copy.deepcopy(self.model)
        groups = [{**g, "params": []} for g in self.optimizer.param_groups]
        pairs = zip(self.model.parameters(), self.twin.parameters(), strict=True)
        twins = {id(p): twin for p, twin in pairs}
        for group, old in zip(groups, self.optimizer.param_groups, strict=True):
            group["params"] = [twins[id(p)] for p in old["params"]]
        self.twin_optimizer = type(self.optimizer)(groups)
        self.check_next()

    def now(self) -> State:
        return State.of(self.model, self.optimizer)

    def after(self) -> State:
        """The state after an eager step from here; nothing of the training moves."""
        before = self.now()
        before.into(self.twin, self.twin_optimizer)
        self.eager(self.twin, self.twin_optimizer)
        found = State.of(self.twin, self.twin_optimizer)
        torch.set_rng_state(before.moved[1])
        return found

    def check_next(self) -> None:
        """The next step is eager's, bit for bit."""
        before = self.now()
        before.into(self.twin, self.twin_optimizer)
        expected = self.eager(self.twin, self.twin_optimizer)
        after = State.of(self.twin, self.twin_optimizer)
        torch.set_rng_state(before.moved[1])
        assert_same(self.step(), expected)
        self.check_same(self.now(), after)

    def fails(
        self,
        injection: AbstractContextManager[Any] | None = None,
        step: Callable[[], object] | None = None,
        whole: bool = False,
        at_once: bool = True,
    ) -> BaseException | None:
        """Run a step that fails, and check everything but the error, which is returned without its
        traceback; None: it did not fail.

        Args:
            injection: entered around the step.
            step: what to run instead of a step.
            whole: whether the state must be whole that before or after the step, not only each of
                what the forward and what the updates change.
            at_once: whether memory returns without the garbage collector.
        """
        before, after = self.now(), self.after()
        error: BaseException | None = None
        with metered(CPU) as use:
            try:
                with injection or nullcontext():
                    (step or self.step)()
            except BaseException as caught:  # noqa: BLE001  # returned
                error = caught.with_traceback(None)
                error.__cause__ = error.__context__ = None
            self.model.zero_grad(set_to_none=True)
            # The worker ends what it has begun, and torch's engine, in eager too, keeps the
            # gradients of a backward that failed until the next one.
            self.host_bytes()
            torch.zeros((), requires_grad=True).backward(torch.ones(()))
            if not at_once:
                gc.collect()
        assert use.end_bytes <= self.renewed_bytes, f"{use.end_bytes} bytes stay"
        self.check_nothing_left()
        found = self.now()
        sides = [
            (same(found.trained, one.trained), same(found.moved, one.moved))
            for one in (before, after)
        ]
        assert any(trained for trained, _ in sides), "parameters or optimizer state are between"
        assert any(moved for _, moved in sides), "buffers or random state are between"
        assert not whole or (True, True) in sides, "the step is done in part"
        return error

    @staticmethod
    def check_same(found: State, expected: State) -> None:
        """Two states are equal, bit for bit."""
        assert_same(found.trained, expected.trained)
        assert_same(found.moved, expected.moved)

    def check_nothing_left(self) -> None:
        """No state, no host copy, no lock, no generator back in time."""
        assert self.waiting() == 0
        assert self.host_bytes() == 0
        assert random_state._HERE.moved is None
        assert is_generator_free(), "the lock is held"
