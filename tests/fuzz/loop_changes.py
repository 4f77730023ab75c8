"""What a random training loop may do to a model, and to torch, between its steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrize, prune, vector_to_parameters

from tests.fuzz.loop_actions import action, finish, plain
from tests.fuzz.loop_state import Loop, backward, forward, outputs


def _linear(loop: Loop) -> nn.Linear | None:
    """A linear layer of the model, with plain parameters."""
    found = [
        one
        for one in loop.model.modules()
        if type(one) is nn.Linear and not parametrize.is_parametrized(one)
    ]
    return loop.dice.choice(found) if found else None


@action
def layer_replaced(loop: Loop) -> None:
    owners = [
        (owner, name, child)
        for owner in loop.model.modules()
        for name, child in owner.named_children()
        if type(child) is nn.Linear
    ]
    if owners and loop.average is None:
        owner, name, child = loop.dice.choice(owners)
        made = nn.Linear(child.in_features, child.out_features, child.bias is not None)
        setattr(owner, name, made.to(child.weight.dtype))
        loop.choose_optimizer()


@action
def parameter_replaced(loop: Loop) -> None:
    layer = _linear(loop)
    if layer is not None:
        layer.weight = nn.Parameter(layer.weight.detach() * 0.5)
        loop.choose_optimizer()


@action
def tied(loop: Loop) -> None:
    """Two layers of one shape share a weight from now on."""
    layers = [one for one in loop.model.modules() if type(one) is nn.Linear]
    for one in layers:
        for other in layers:
            if one is not other and one.weight.shape == other.weight.shape:
                other.weight = one.weight
                return


@action
def reset(loop: Loop) -> None:
    for module in loop.model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


@action
def pruned(loop: Loop) -> None:
    layer = _linear(loop)
    if layer is not None and loop.average is None and not prune.is_pruned(layer):
        prune.l1_unstructured(layer, "weight", amount=0.3)
        loop.choose_optimizer()


@action
def made_permanent(loop: Loop) -> None:
    for module in loop.model.modules():
        if type(module) is nn.Linear and hasattr(module, "weight_orig"):
            prune.remove(module, "weight")
            loop.choose_optimizer()


class Scaled(nn.Module):
    """A parametrisation."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 1.5


@action
def parametrised(loop: Loop) -> None:
    layer = _linear(loop)
    if layer is not None and loop.average is None and not prune.is_pruned(layer):
        parametrize.register_parametrization(layer, "weight", Scaled())
        loop.choose_optimizer()


@action
def through_a_vector(loop: Loop) -> None:
    with torch.no_grad():
        vector_to_parameters(
            parameters_to_vector(loop.model.parameters()) * 0.99, loop.model.parameters()
        )


@action
def activation_changed(loop: Loop) -> None:
    for owner in loop.model.modules():
        for name, child in owner.named_children():
            if isinstance(child, (nn.GELU, nn.SiLU)):
                setattr(owner, name, nn.Tanh())


@action
def momentum_changed(loop: Loop) -> None:
    for module in loop.model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            module.momentum = 0.3
            module.eps = 1e-3


@action
def hidden_saved_tensors(loop: Loop) -> None:
    """A step inside of hooks on saved tensors, as save_on_cpu."""
    with torch.autograd.graph.save_on_cpu():
        plain(loop)


@action
def looked_for_anomalies(loop: Loop) -> None:
    with torch.autograd.set_detect_anomaly(True):
        plain(loop)


@action
def given_gradients(loop: Loop) -> None:
    out, _ = forward(loop)
    leaves = outputs(out)
    if leaves:
        torch.autograd.backward(leaves, [torch.ones_like(one) * 0.1 for one in leaves])
    finish(loop)


@action
def hooked_output(loop: Loop) -> None:
    out, _ = forward(loop)
    for leaf in outputs(out):
        leaf.register_hook(lambda gradient: gradient * 2)
        leaf.retain_grad()
    backward(loop, out)
    loop.saw("output gradients", ["none" if x.grad is None else x.grad for x in outputs(out)])
    finish(loop)


@action
def called_by_functional_call(loop: Loop) -> None:
    state = {name: value.detach() * 1.1 for name, value in loop.model.named_parameters()}
    out = torch.func.functional_call(loop.model, state, loop.inputs(8))
    loop.saw("functional", out)


@action
def deterministic(loop: Loop) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plain(loop)
    finally:
        torch.use_deterministic_algorithms(before)


@action
def other_seed_within(loop: Loop) -> None:
    """Random numbers drawn between forward and backward."""
    out, _ = forward(loop)
    torch.rand(3)
    backward(loop, out, torch.rand(()))
    finish(loop)


@action
def partly_without_gradients(loop: Loop) -> None:
    """A call whose inputs come from a call without gradients."""
    with torch.no_grad():
        first, _ = forward(loop, 8)
    out, _ = forward(loop, 8)
    leaves = [x for x in torch.utils._pytree.tree_leaves(first) if isinstance(x, Tensor)]
    backward(loop, out, leaves[0].float().mean().sigmoid())
    finish(loop)


@action
def gradients_scaled_in_place(loop: Loop) -> None:
    out, _ = forward(loop)
    backward(loop, out)
    for parameter in loop.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    finish(loop)


@action
def gradients_shared(loop: Loop) -> None:
    """Gradients are views of one buffer, as DDP's and Apex's."""
    parameters = [one for one in loop.model.parameters() if one.requires_grad]
    flat = torch.zeros(sum(one.numel() for one in parameters), dtype=parameters[0].dtype)
    begin = 0
    for one in parameters:
        one.grad = flat[begin : begin + one.numel()].view_as(one).to(one.dtype)
        begin += one.numel()
    out, _ = forward(loop)
    backward(loop, out)
    loop.saw("buffer", flat)
    loop.look()
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=True)


@action
def widened(loop: Loop) -> None:
    """The model in another precision, and back."""

    def inputs(values: tuple[Tensor, ...], dtype: torch.dtype) -> list[Any]:
        return [x.to(dtype) if x.dtype is torch.float32 else x for x in values]

    loop.model.double()
    out = loop.model(*inputs(loop.inputs(8), torch.float64))
    backward(loop, out)
    loop.look()
    loop.model.zero_grad()
    loop.model.float()
    loop.choose_optimizer()
