"""Hooks of every kind: on modules, parameters, tensors, nodes, optimizers, saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.nn.modules import module as everywhere
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from tests.surroundings.situation import MODULE_WAYS, WAYS, Net, Setting, mean_square, situation

HOOKED: list[Any] = []
SAVED = "[Ss]aved[- _]tensors?[- _]hooks?"


def hooked(attach: Callable[[nn.Module], Any], **how: Any) -> Setting:
    """A plain model with a hook that writes down what it sees in HOOKED."""
    HOOKED.clear()
    model = Net()
    attach(model)
    return Setting(model, lambda: HOOKED, **how)


def note(*values: Any) -> None:
    HOOKED.append([v.detach() if isinstance(v, Tensor) else v for v in values])


def kept(_module: Any, _args: Any, output: Tensor) -> None:
    HOOKED.append(output)


def on_all_modules(hook: Callable[..., Any]) -> Setting:
    """A plain model, and a forward hook on all modules around each step."""
    HOOKED.clear()
    return Setting(
        Net(), lambda: HOOKED, around=lambda: everywhere.register_module_forward_hook(hook)
    )


@situation("a forward hook keeps features in a global", "HOOKED|hook|kept", quick=True)
def _() -> Setting:
    return hooked(
        lambda model: model.first.register_forward_hook(kept),
        loss=lambda y, t: mean_square(y, t) + HOOKED[-1].abs().mean(),
        after=lambda _: HOOKED.clear(),
    )


@situation("a forward hook counts activations' statistics", "HOOKED|hook|statistics")
def _() -> Setting:
    def statistics(_m: Any, _a: Any, output: Tensor) -> None:
        HOOKED.append(output.detach().mean())

    return hooked(lambda model: model.first.register_forward_hook(statistics))


@situation("a forward hook changes the output", "hook", exact=("plan", "wrap", "train_step"))
def _() -> Setting:
    return hooked(lambda model: model.first.register_forward_hook(lambda _m, _a, y: y * 0.5))


@situation("a forward hook on the model itself", "HOOKED|hook|outer")
def _() -> Setting:
    def outer(_m: Any, _a: Any, output: Tensor) -> Tensor:
        HOOKED.append(output.detach())
        return output * 2

    return hooked(lambda model: model.register_forward_hook(outer))


@situation("a forward pre-hook changes the input", "hook|HOOKED")
def _() -> Setting:
    def pre(_m: Any, args: Any) -> Any:
        note("called")
        return (args[0] * 2,)

    return hooked(lambda model: model.last.register_forward_pre_hook(pre))


@situation("a pre-hook sets an attribute", "seen_shape|hook")
def _() -> Setting:
    def pre(module: Any, args: Any) -> None:
        module.seen_shape = tuple(args[0].shape)

    return hooked(lambda model: model.last.register_forward_pre_hook(pre))


@situation("a pre-hook makes the weight", "scaled|hook|weight")
def _() -> Setting:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.scaled, self.bias)

    def pre(module: Any, _args: Any) -> None:
        module.scaled = module.weight * 0.5

    def attach(model: nn.Module) -> None:
        model.last = Scaled(8, 3)
        model.last.register_forward_pre_hook(pre)

    return hooked(attach)


@situation("a forward hook that runs always", "hook|HOOKED")
def _() -> Setting:
    def always(_m: Any, _a: Any, _o: Tensor) -> None:
        note("ran")

    return hooked(lambda model: model.last.register_forward_hook(always, always_call=True))


@situation("a hook on all modules of the process", "hook|HOOKED|module")
def _() -> Setting:
    def each(module: Any, _args: Any, _output: Any) -> None:
        if isinstance(module, (Net, nn.Linear)):
            note(type(module).__name__)

    return on_all_modules(each)


# Around torch.compile(module) torch has a module of its own, and says that it calls hooks on it.
@situation(
    "a hook on all modules of the process changes what each returns",
    "hook|module",
    ways=("plan", "wrap", "train_step"),
    quick=True,
)
def _() -> Setting:
    def each(module: Any, _args: Any, output: Any) -> Any:
        note(type(module).__name__)
        return output * 1.25 if isinstance(output, Tensor) else None

    return on_all_modules(each)


@situation("a full backward hook sees gradients", "hook")
def _() -> Setting:
    def back(_m: Any, inputs: Any, outputs: Any) -> None:
        note(inputs[0], outputs[0])

    return hooked(lambda model: model.last.register_full_backward_hook(back))


@situation("a full backward hook changes gradients", "hook", quick=True)
def _() -> Setting:
    def back(_m: Any, inputs: Any, _outputs: Any) -> Any:
        return (inputs[0] * 0.5,)

    return hooked(lambda model: model.last.register_full_backward_hook(back))


@situation("a full backward pre-hook", "hook")
def _() -> Setting:
    def back(_m: Any, outputs: Any) -> Any:
        note(outputs[0])
        return (outputs[0] * 2,)

    return hooked(lambda model: model.last.register_full_backward_pre_hook(back))


@situation("a full backward hook on the model itself", "hook")
def _() -> Setting:
    def back(_m: Any, _inputs: Any, outputs: Any) -> None:
        note(outputs[0])

    return hooked(lambda model: model.register_full_backward_hook(back))


@situation("a parameter's hook clips", "hook", quick=True)
def _() -> Setting:
    def clip(gradient: Tensor) -> Tensor:
        note(gradient)
        return gradient.clamp(-0.01, 0.01)

    return hooked(lambda model: model.first.weight.register_hook(clip))


@situation("a hook after a gradient is accumulated", "hook")
def _() -> Setting:
    def seen(parameter: Tensor) -> None:
        note(parameter.grad)

    return hooked(lambda model: model.last.bias.register_post_accumulate_grad_hook(seen))


@situation("the optimizer in the backward", "hook", ways=MODULE_WAYS, quick=True)
def _() -> Setting:
    model = Net()
    optimizers = {p: torch.optim.AdamW([p], 1e-2) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return Setting(model, lambda: [one.state_dict() for one in optimizers.values()])


@situation("a hook on several gradients", "hook", ways=MODULE_WAYS)
def _() -> Setting:
    def both(gradients: Any) -> None:
        note(*gradients)

    return hooked(lambda model: register_multi_grad_hook([model.first.bias, model.last.bias], both))


class HooksHidden(Net):
    """Registers a hook on a tensor of its forward."""

    def touch(self, h: Tensor) -> Tensor:
        h.register_hook(lambda gradient: HOOKED.append(gradient))
        return h


@situation("a hook that the forward sets logs gradients", "hook|HOOKED", quick=True)
def _() -> Setting:
    HOOKED.clear()
    return Setting(HooksHidden(), lambda: HOOKED)


class Reversed(Net):
    def touch(self, h: Tensor) -> Tensor:
        h.register_hook(lambda gradient: -0.5 * gradient)
        return h


@situation("a hook that the forward sets reverses gradients", "hook")
def _() -> Setting:
    return Setting(Reversed())


class Retains(Net):
    """Keeps a hidden tensor, whose gradient is looked at after the backward (Grad-CAM)."""

    kept: Any = None

    def touch(self, h: Tensor) -> Tensor:
        h.retain_grad()
        self.kept = h
        return h


@situation("retain_grad in the forward", "kept|retain_grad", ways=MODULE_WAYS)
def _() -> Setting:
    model = Retains()
    return Setting(model, lambda: [model.kept, None if model.kept is None else model.kept.grad])


class Outside(Net):
    """Hands its output to the loss, which hangs a hook on it."""


@situation("a hook on the output", "hook|output", ways=MODULE_WAYS)
def _() -> Setting:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        output.register_hook(lambda gradient: note(gradient))
        return mean_square(output, target)

    HOOKED.clear()
    return Setting(Outside(), lambda: HOOKED, loss)


@situation("a hook on the output's node", "hook|output|grad_fn", ways=MODULE_WAYS)
def _() -> Setting:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        output.grad_fn.register_prehook(lambda gradients: note(*gradients))
        return mean_square(output, target)

    HOOKED.clear()
    return Setting(Outside(), lambda: HOOKED, loss)


@situation("a hook on an input that wants a gradient", "hook|input", quick=True, exact=WAYS)
def _() -> Setting:
    class Shifted(Net):
        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return super().forward(x + shift)

    shift = torch.zeros(6, requires_grad=True)
    HOOKED.clear()
    shift.register_hook(lambda gradient: note(gradient))
    return Setting(Shifted(), lambda: [HOOKED, shift, shift.grad], inputs=lambda _: (shift,))


@situation("an optimizer's step hooks", "hook", exact=MODULE_WAYS)
def _() -> Setting:
    def optimizer(parameters: Any) -> Optimizer:
        made = torch.optim.SGD(parameters, 0.1)
        made.register_step_pre_hook(lambda *_: note("before"))
        made.register_step_post_hook(lambda *_: note("after"))
        return made

    HOOKED.clear()
    return Setting(Net(), lambda: HOOKED, optimizer=optimizer)


@situation("a hook that is added after planning", "hook")
def _() -> Setting:
    model = Net()
    HOOKED.clear()

    def ready(_module: Any) -> None:
        model.first.register_forward_hook(kept)

    return Setting(
        model,
        lambda: HOOKED,
        lambda y, t: mean_square(y, t) + (HOOKED[-1].abs().mean() if HOOKED else 0),
        ready=ready,
        after=lambda _: HOOKED.clear(),
    )


@situation("a parameter's hook added after planning", "hook")
def _() -> Setting:
    model = Net()
    HOOKED.clear()

    def ready(_module: Any) -> None:
        model.first.weight.register_hook(lambda gradient: note(gradient) or gradient * 0.5)

    return Setting(model, lambda: HOOKED, ready=ready)


@situation("a hook is removed after a step", "hook")
def _() -> Setting:
    model = Net()
    handle = model.first.register_forward_hook(lambda _m, _a, y: y * 0.5)
    return Setting(model, after=lambda _: handle.remove())


@situation("saved-tensor hooks around a step", SAVED)
def _() -> Setting:
    def pack(x: Tensor) -> Tensor:
        return x

    return Setting(Net(), around=lambda: saved_tensors_hooks(pack, pack))


@situation("save_on_cpu around a step", f"{SAVED}|save_on_cpu")
def _() -> Setting:
    return Setting(Net(), around=save_on_cpu)


@situation("saved-tensor hooks that lose precision", SAVED, ways=MODULE_WAYS)
def _() -> Setting:
    def around() -> Any:
        return saved_tensors_hooks(lambda x: x.half(), lambda x: x.float())

    return Setting(Net(), around=around)


@situation("saved-tensor hooks are disabled around a step", SAVED)
def _() -> Setting:
    def around() -> Any:
        return torch.autograd.graph.disable_saved_tensors_hooks("surroundings: none here")

    return Setting(Net(), around=around)


class SavesInside(Net):
    def touch(self, h: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda x: x * 1, lambda x: x * 2):
            return h.sin()


@situation("saved-tensor hooks in the forward", SAVED)
def _() -> Setting:
    return Setting(SavesInside())


class Checkpointed(Net):
    def touch(self, h: Tensor) -> Tensor:
        return checkpoint(self.block, h, use_reentrant=False)

    def block(self, h: Tensor) -> Tensor:
        HOOKED.append("ran")
        return torch.dropout(h, 0.5, True).sin()


@situation("a checkpointed block that counts its runs", "HOOKED")
def _() -> Setting:
    HOOKED.clear()
    return Setting(Checkpointed(), lambda: HOOKED)


@situation("a state_dict hook", "hook", exact=MODULE_WAYS)
def _() -> Setting:
    model = Net()
    HOOKED.clear()
    model.register_state_dict_post_hook(lambda *_: note("saved"))
    return Setting(model, lambda: HOOKED, after=lambda _: model.state_dict() and None)
