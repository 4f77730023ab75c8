"""What a random training loop may do between, around and to a model (`tests.fuzz.loops`)."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memopt
from tests.fuzz.loop_models import Tokens
from tests.fuzz.loop_state import Loop, backward, forward, loss_of, outputs

Action = Callable[[Loop], None]
ACTIONS: dict[str, Action] = {}


def action(call: Action) -> Action:
    """Register what a loop may do."""
    ACTIONS[call.__name__] = call
    return call


def finish(loop: Loop) -> None:
    """Step the optimizer."""
    loop.look()
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=loop.dice.random() < 0.8)


@action
def plain(loop: Loop) -> None:
    out, _ = forward(loop)
    loop.saw("loss", backward(loop, out))
    del out
    finish(loop)


@action
def accumulate(loop: Loop) -> None:
    for _ in range(loop.dice.randint(2, 3)):
        out, _ = forward(loop)
        backward(loop, out, 0.5)
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)
    finish(loop)


@action
def two_calls(loop: Loop) -> None:
    first, _ = forward(loop)
    second, _ = forward(loop)
    one, other = loss_of(loop, first), loss_of(loop, second)
    if one is not None and other is not None:
        one.backward()
        other.backward()
    finish(loop)


@action
def two_in_one(loop: Loop) -> None:
    first, _ = forward(loop, 8)
    second, _ = forward(loop, 8)
    one, other = loss_of(loop, first), loss_of(loop, second)
    if one is not None and other is not None:
        (one + other).backward()
    finish(loop)


@action
def gradients_of_inputs(loop: Loop) -> None:
    out, inputs = forward(loop, grad=True)
    backward(loop, out)
    loop.saw("inputs", ["none" if x.grad is None else x.grad for x in inputs])
    finish(loop)


@action
def computed_inputs(loop: Loop) -> None:
    shift = nn.Parameter(torch.full((), 0.1))
    inputs = [x + shift if x.is_floating_point() else x for x in loop.inputs(8)]
    with loop.context():
        out = loop.model(*inputs)
    backward(loop, out)
    loop.saw("shift", "none" if shift.grad is None else shift.grad)
    finish(loop)


@action
def asked_gradients(loop: Loop) -> None:
    out, _ = forward(loop)
    trained = [p for p in loop.model.parameters() if p.requires_grad]
    some = loop.dice.sample(trained, min(2, len(trained)))
    loss = loss_of(loop, out)
    if loss is not None and some:
        keep = loop.dice.random() < 0.3
        got = torch.autograd.grad(loss, some, allow_unused=True, retain_graph=keep)
        loop.saw("asked", ["none" if g is None else g for g in got])
        if keep:
            loss.backward()
    finish(loop)


@action
def kept_graph(loop: Loop) -> None:
    out, _ = forward(loop)
    one, other = loss_of(loop, out), loss_of(loop, out)
    if one is not None and other is not None:
        one.backward(retain_graph=True)
        other.backward()
    finish(loop)


@action
def no_backward(loop: Loop) -> None:
    out, _ = forward(loop)
    if loop.dice.random() < 0.5:
        loop.held.append(out)
    if len(loop.held) > 2:
        loop.held.pop(0)


@action
def held_output(loop: Loop) -> None:
    out, _ = forward(loop)
    loop.held += [backward(loop, out), out]
    loop.held[:] = loop.held[-2:]
    finish(loop)


@action
def evaluate(loop: Loop) -> None:
    loop.model.eval()
    with torch.no_grad():
        forward(loop, 5)
    loop.model.train()


@action
def trained_in_eval(loop: Loop) -> None:
    loop.model.eval()
    out, _ = forward(loop)
    backward(loop, out)
    loop.model.train()
    finish(loop)


@action
def statistics_only(loop: Loop) -> None:
    with torch.no_grad():
        forward(loop, 8)
    loop.look()


@action
def frozen_part(loop: Loop) -> None:
    parameters = list(loop.model.parameters())
    for one in loop.dice.sample(parameters, min(2, len(parameters))):
        one.requires_grad_(not one.requires_grad)
        one.grad = None
    if not any(p.requires_grad for p in parameters):
        parameters[-1].requires_grad_()
    if loop.dice.random() < 0.5:
        loop.choose_optimizer()


@action
def part_in_eval(loop: Loop) -> None:
    part = loop.dice.choice(list(loop.model.modules())[1:] or [loop.model])
    part.train(not part.training)


@action
def dropout_changes(loop: Loop) -> None:
    for module in loop.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = loop.dice.choice((0.0, 0.1, 0.3))


@action
def hook_added(loop: Loop) -> None:
    part = loop.dice.choice(list(loop.model.modules()))
    kind = loop.dice.choice((0, 1, 3, 4, 3, 4, 0, 1, 2))

    def note(name: str) -> Callable[..., None]:
        return lambda _module, *values: loop.saw(name, values[-1])

    if kind == 0:
        loop.handles.append(part.register_forward_hook(note("forward hook")))
    elif kind == 1:
        loop.handles.append(part.register_forward_pre_hook(note("forward pre hook")))
    elif kind == 2:
        loop.handles.append(loop.model.register_full_backward_hook(note("backward hook")))
    else:
        trained = [p for p in loop.model.parameters() if p.requires_grad]
        one = loop.dice.choice(trained)
        if kind == 3:
            loop.handles.append(one.register_hook(lambda g: loop.saw("parameter hook", g)))
        else:
            loop.handles.append(
                one.register_post_accumulate_grad_hook(lambda p: loop.saw("accumulated", p.grad))
            )


@action
def hook_removed(loop: Loop) -> None:
    if loop.handles:
        loop.handles.pop(loop.dice.randrange(len(loop.handles))).remove()


@action
def saved_and_loaded(loop: Loop) -> None:
    state = copy.deepcopy(loop.model.state_dict())
    plain(loop)
    loop.model.load_state_dict(state, assign=loop.dice.random() < 0.2)
    if loop.dice.random() < 0.5:
        loop.choose_optimizer()


@action
def averaged(loop: Loop) -> None:
    if loop.average is not None:
        with torch.no_grad():
            pairs = zip(loop.average.parameters(), loop.model.parameters(), strict=True)
            for mean, value in pairs:
                mean.lerp_(value.detach(), 0.1)


@action
def copied(loop: Loop) -> None:
    twin = copy.deepcopy(loop.model)
    with torch.no_grad():
        loop.saw("copy", twin(*loop.inputs(8)))


@action
def swapped_weight(loop: Loop) -> None:
    one = loop.dice.choice(list(loop.model.parameters()))
    with torch.no_grad():
        if loop.dice.random() < 0.5:
            one.mul_(0.9)
        else:
            one.data = one.data.clone() * 0.9


@action
def failed_loss(loop: Loop) -> None:
    out, _ = forward(loop)
    try:
        raise KeyError("the loss fails")
    except KeyError:
        del out
    loop.look()


@action
def failed_input(loop: Loop) -> None:
    inputs = tuple(x[:, :1] if x.ndim > 1 else x for x in loop.inputs(8))
    try:
        loop.model(*inputs)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        loop.saw("error", type(error).__name__)
    loop.look()


@action
def failed_backward(loop: Loop) -> None:
    out, _ = forward(loop)
    leaves = outputs(out)
    if leaves:

        def fails(_: Tensor) -> None:
            raise KeyError("a hook of the loss fails")

        leaf = leaves[0] * 1
        leaf.register_hook(fails)
        try:
            leaf.abs().sum().backward()
        except KeyError as error:
            loop.saw("error", str(error))
    loop.look()


@action
def penalty(loop: Loop) -> None:
    """A gradient penalty; the original runs."""
    out, inputs = forward(loop, grad=True)
    wanted = [x for x in inputs if x.requires_grad]
    leaves = [] if isinstance(loop.model, Tokens) else outputs(out)
    if wanted and leaves:
        got = torch.autograd.grad(
            leaves[0].float().sum(), wanted, create_graph=True, allow_unused=True
        )
        norms = [g.square().sum() for g in got if g is not None and g.requires_grad]
        if norms:
            torch.stack(norms).sum().backward()
    finish(loop)


@action
def closure(loop: Loop) -> None:
    def again() -> Tensor:
        loop.optimizer.zero_grad()
        out, _ = forward(loop, 8)
        loss = loss_of(loop, out)
        if loss is None:
            return torch.zeros(())
        loss.backward()
        return loss.detach()

    loop.saw("closure", loop.optimizer.step(again))
    loop.look()


@action
def detached_part(loop: Loop) -> None:
    out, _ = forward(loop)
    leaves = outputs(out)
    if leaves:
        weight = leaves[0].detach().float().mean().tanh()
        (leaves[0].float().square().mean() * weight).backward()
    finish(loop)


@action
def changed_output(loop: Loop) -> None:
    out, _ = forward(loop)
    leaves = [leaf for leaf in outputs(out) if leaf.is_floating_point()]
    if leaves:
        try:
            leaves[-1].mul_(0.5)
        except RuntimeError as error:
            loop.saw("error", type(error).__name__)
        leaves[-1].float().square().mean().backward()
    finish(loop)


@action
def through_checkpoint(loop: Loop) -> None:
    inputs = [x.requires_grad_() if x.is_floating_point() else x for x in loop.inputs(8)]
    with loop.context():
        out = checkpoint(loop.model, *inputs, use_reentrant=False)
    backward(loop, out)
    finish(loop)


@action
def rewrapped(loop: Loop) -> None:
    if loop.wrap is not None:
        memopt.unwrap(loop.model)
        loop.wrap(loop.model)
