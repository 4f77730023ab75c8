"""Counts how calls of a wrapped or planned model ran, and warns of those without a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memopt.errors import CaptureError
from memopt.executor.differentiated import DIFFERENTIATED, PARTIAL, REMEDIES
from memopt.models.budget import format_bytes
from memopt.models.warned import warn
from memopt.step.described import described_text
from memopt.step.memory_layout import storage_of
from memopt.step.shards import held_gradients, local_part
from memopt.torch_private import pytree
from memopt.torch_private.modules import hooks_on_all_forwards


def has_own(model: nn.Module, name: str) -> bool:
    """Return whether an attribute of this name is the model's own, not one set by `memopt.wrap`."""
    try:
        return not isinstance(getattr(model, name), Calls)
    except AttributeError:
        return False


def difference(before: Any, now: Any) -> str:
    """Return how one kind of call differs from another, for messages."""
    if before[0] != now[0]:
        return "which arguments there are"
    for position, (was, found) in enumerate(zip(before[1], now[1], strict=True)):
        if was != found:
            return f"argument {position}: {described_text(was)}, then {described_text(found)}"
    for what, was, found in zip(_OF_A_KIND, before[2:], now[2:], strict=True):
        if was != found:
            return what
    return "nothing"


_OF_A_KIND = (
    "autocast is on, off or of another dtype",
    "a mask lets all through, or no longer does",
    "in which memory layouts gradients of the outputs arrive",
    "which parameters are trained (requires_grad)",
    "whether there are gradients already when the forward begins (zero_grad)",
)
"""What a kind of call consists of besides its arguments, see `SelfPlanning._kind`."""


def uses(model: nn.Module, name: str) -> bool:
    """Return whether a model has an attribute, or its class's code uses that name."""
    if name in model.__dict__ or hasattr(model, name):
        return True
    classes = type(model).__mro__[: type(model).__mro__.index(nn.Module)]
    codes = [getattr(x, "__code__", None) for one in classes for x in vars(one).values()]
    return any(name in (*c.co_names, *c.co_consts) for c in codes if c is not None)


def refuse_script() -> None:
    """Raise CaptureError in torch.jit.script of a wrapped model or of one around it. (torch asks a
    module for what it is to compile, and puts the answer in the module's place.)"""
    raise CaptureError(
        "torch.jit.script compiles a model's own code, not what memopt.wrap makes of it: call "
        "memopt.unwrap(model) before, or script copy.copy(model), which is a plain model over the "
        "same parameters"
    )


_MANY = (8, 32, 128, 512, 2048)


def warn_of_many_plans(made: int, differs: str, remedy: str) -> None:
    """Warn that plans are made for many kinds of calls; again each time that their number has
    quadrupled."""
    if made in _MANY:
        warn(
            f"{made} plans were made, one for each kind of call, and to make one takes as long as "
            f"many steps. The last differs from the one before: {differs}. Pad tensors to a few "
            "sizes; pass a number that changes as a tensor (torch.tensor(0.1)), or keep it in a "
            f"buffer of the model; or have other kinds run unplanned ({remedy})",
        )


def warn_of_hooks_around() -> None:
    """Warn that hooks on all modules also run on an applied plan's module, as torch calls them."""
    if hooks_on_all_forwards():
        warn(
            "there are hooks on all modules (register_module_forward_hook and the like): they are "
            "in the planned step, and run once more on the planned module around it. "
            "memopt.wrap(model, budget) runs them as often as the model itself does",
        )


def warned_of_gradients(model: nn.Module, spare_bytes: int) -> bool:
    """Warn if gradients are held when a step begins for which the budget has no room."""
    # Gradients in one buffer count their own bytes each, at most the buffer.
    parts: dict[int, int] = {}
    whole: dict[int, int] = {}
    for gradient in map(local_part, held_gradients(model)):
        storage = storage_of(gradient)
        parts[storage] = parts.get(storage, 0) + gradient.nbytes
        whole[storage] = gradient.untyped_storage().nbytes()
    held_bytes = sum(min(size, parts[storage]) for storage, size in whole.items())
    if held_bytes <= spare_bytes:
        return False
    warn(
        f"gradients of {format_bytes(held_bytes)} were there when a planned step began, which "
        "the plan does not charge: it may exceed its budget by "
        f"{format_bytes(held_bytes - spare_bytes)}. Plan with accumulate=True, or set "
        "gradients to None before each step",
    )
    return True


def warned_of_idle(model: nn.Module, optimizer: Optimizer, settled: set[nn.Parameter]) -> bool:
    """Warn if an optimizer trains a model that was never called."""
    groups = (group["params"] for group in optimizer.param_groups)
    trained = {one for group in groups for one in group if one.grad is not None} - settled
    if trained.isdisjoint(model.parameters()):
        return False
    warn(
        f"the wrapped {type(model).__name__} is trained and was not called: memopt plans what "
        "model(...) runs, not its other methods, nor sub-modules that the loop calls by "
        "themselves. Nothing is planned, and the budget is not kept: wrap the modules that the "
        "loop calls (several sub-modules share the budget by parts=[their names]), or let it call "
        "the model (torch.compile(model) in place of model.compile(), which takes its calls "
        "elsewhere). A function that torch.compile compiled with a plain "
        "model goes on without a plan: call torch.compiler.reset() once the model is wrapped, and "
        "give that function no plain model of the same class",
    )
    return True


PARTLY_TRAINING = "the model itself is in eval mode, parts of it are not"

_UNPLANNED = (
    "a training step ran without its plan: {}. The planned module's .calls counts how its calls "
    "ran; this is said once"
)
_IN_EVAL_MODE = (
    "a backward runs through a call in eval mode, which runs without a plan and outside of the "
    "budget. If that is training, call model.train() first (from_pretrained returns models in eval "
    "mode), then eval() on the parts that are to stay so; the module's .calls counts such calls as "
    "original, and this is said once"
)


@dataclass
class Calls:
    """How many calls of a planned module ran in which way.

    Attributes:
        planned: under the plan.
        original: by the unplanned model: evaluation, and with `on_mismatch="original"` calls that
            were not planned.
        replanned: under another plan, with `on_mismatch="plan"`.
    """

    planned: int = 0
    original: int = 0
    replanned: int = 0
    _told: set[str] = field(default_factory=set, repr=False, compare=False)

    def fall_back(self, model: nn.Module, reason: str, output: Any = None) -> Any:
        """Count a call of the unplanned model, and return its output. When it is the first training
        step, its backward warns; or the call itself, where no output shows one. The first backward
        through a call in eval mode warns, too."""
        self.original += 1
        if not torch.is_grad_enabled() or self._told >= {_UNPLANNED, _IN_EVAL_MODE}:
            return output
        training = any(module.training for module in model.modules())
        words = _UNPLANNED if training else _IN_EVAL_MODE
        if words in self._told:
            return output
        tell = partial(self._tell, words, reason)
        tensors = (x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor))
        nodes = [x.grad_fn for x in tensors if x.grad_fn is not None]
        for node in nodes:
            node.register_prehook(tell)
        if training and not nodes:
            tell()
        return output

    def _tell(self, words: str, reason: str, _gradients: Any = None) -> None:
        if words not in self._told:
            self._told.add(words)
            warn(words.format(reason))

    def take_back(self, why: str, remedy: str | None = None) -> None:
        """Count a planned call as unplanned, since the original model runs again for its backward;
        warn once per reason.

        Args:
            why: the reason, such as a key of `memopt.executor.differentiated.REMEDIES`.
            remedy: what the warning says to do, or what is done; None: the one known for the
                reason.
        """
        self.planned -= 1
        self.original += 1
        if why not in self._told:
            self._told.add(why)
            more = f". You can {REMEDIES[why]}" if why is PARTIAL else ""
            if remedy is not None:
                more = f". {remedy}"
            elif why is DIFFERENTIATED:
                # Its parts of gradients are summed apart from those of the planned call.
                more = (
                    "; where the loss uses the call's outputs, too, its gradients can differ in "
                    "their last bits (later calls run as the original)"
                )
            warn(
                f"{why}: the original model runs for it, outside of the budget{more}. The "
                "planned module's .calls counts such calls; this is said once",
            )
