"""Captures a whole training step: forward, loss, backward, and one operator per update.

Model and loss are captured as one module with a scalar output, whose tangent is 1. The gradient of
a trained parameter is read by an UPDATE operator instead of being a result of the step, so its
lifetime ends with that update.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from memopt.capture.capture import capture
from memopt.capture.uncaptured import python_name
from memopt.errors import CaptureError
from memopt.kernels.compiled.choice import Fuse
from memopt.models.graph import Operator, Phase
from memopt.models.step_rules import PLAIN, StepRules
from memopt.models.warned import warn
from memopt.step.assumed import values_of
from memopt.step.build import Lowering, build
from memopt.step.captured import Captured
from memopt.step.fused import Fused
from memopt.step.gradient_norms import with_norms
from memopt.step.inputs import Call
from memopt.step.joined_collectives import AFTER_SCATTER
from memopt.step.joint_graph import of_the_loss
from memopt.step.loss import Loss
from memopt.step.micro_batches import repeated
from memopt.step.ranks import ranks_of
from memopt.step.results import held_by
from memopt.step.shards import any_shards
from memopt.step.step_optimizer import Update
from memopt.step.step_parts import StepModule, StepParts, UpdateSite, update_name
from memopt.torch_private.operators import aten as _ATEN
from memopt.torch_private.operators import collectives
from memopt.torch_private.tensors import SHARD

_HALF = torch.float16


def capture_step(
    model: nn.Module,
    call: Call,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    block_bytes: int,
    fuse: Fuse | None = None,
    rules: StepRules = PLAIN,
) -> StepParts:
    """Capture forward, loss and backward, and find where each parameter is updated. `fuse` chooses
    the step's kernels; None: ATen's.

    Raises:
        CaptureError: as `capture`; or the loss is no scalar that needs a gradient.
        ValueError: the step cannot follow the rules.
    """
    module = StepModule(model, loss.function)
    step_call = Call((loss.targets, *call.args), call.kwargs)
    captured = _captured(module, step_call)
    _check_effects(captured)
    _check_registered(captured)
    captured = _with_checks(_of_the_step(captured), rules, ranks_of(model) is None)
    lowering = build(module, captured, block_bytes)
    made = Fused(captured, lowering)
    if fuse is not None:
        made = fuse(module, captured, lowering)
        captured, lowering = made.captured, made.lowering
    parameters = dict(module.named_parameters())
    every = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    numbers = {id(p): i for i, p in enumerate(every)}
    ranks = {name: numbers[id(p)] for name, p in parameters.items() if id(p) in numbers}
    once, largest, count = captured, None, rules.micro_batches
    values = dict(zip(captured.mutated, captured.forward_outputs, strict=False))
    if count > 1:
        late = _reductions(model, captured) if rules.reduce_once else ()
        captured, lowering = repeated(captured, lowering, count, block_bytes, late)
        values = dict(zip(once.mutated, captured.other_results[count - 1 :], strict=True))
    if rules.clip_norm is not None or rules.scaled:
        positions = _trained_positions(module, captured, ranks, rules)
        trained = [parameters[captured.primals[i].name] for i in positions]
        captured, lowering, largest = with_norms(
            captured, lowering, positions, trained, rules, block_bytes
        )
    found: list[tuple[int, UpdateSite]] = []
    pairs = zip(captured.primals, captured.gradients, strict=True)
    for position, (primal, gradient) in enumerate(pairs):
        if not isinstance(gradient, Node) or primal.name not in ranks:
            continue
        value = values.get(position)
        read = [gradient, primal.node, *(one for one in (value, largest) if one is not None)]
        reads = held_by(read, lowering.storages)
        found.append((ranks[primal.name], UpdateSite(primal.name, gradient, reads, value)))
    found.sort(key=lambda pair: pair[0])
    sites = tuple(site for _, site in found)
    return StepParts(
        module=module,
        call=step_call,
        captured=captured,
        lowering=lowering,
        update=Update(),
        sites=sites,
        fused=made,
        rules=rules,
        once=once,
        mutated=once.mutated,
        largest=largest,
    )


def _captured(module: StepModule, call: Call) -> Captured:
    try:
        return capture(module, call)
    except CaptureError as error:
        error.modules = module.names_in_model(error.modules)
        raise


def _reductions(model: nn.Module, captured: Captured) -> tuple[Node, ...]:
    """Return the calls that average gradients over ranks.

    Raises:
        ValueError: the model is not sharded.
    """
    if not any_shards(model.parameters()):
        raise ValueError(
            "reduce_once=True is for models that memopt.shard has spread over ranks: shard it "
            "first, or leave reduce_once out"
        )
    return reductions(captured)


def _of_the_step(captured: Captured) -> Captured:
    """Return a capture with the loss's tangents, and gradients of tensors alone: beside that of a
    shard AOTAutograd returns its mesh."""
    pairs = zip(captured.primals, captured.gradients, strict=True)
    gradients = tuple(one if primal.part in ("", SHARD) else None for primal, one in pairs)
    return replace(captured, tangents=of_the_loss(captured.tangents), gradients=gradients)


def _check_effects(captured: Captured) -> None:
    """Refuse a step that leaves behind tensors that belong to the graph it has already run."""
    if captured.effects.made_by_call:
        raise CaptureError(
            f"the step leaves tensors or counts behind in {', '.join(captured.effects.shown)}, "
            "which a train step does not do: clear it in loss_fn, or plan the module alone "
            "(memopt.plan(model, inputs) and plan.apply, or memopt.wrap), which does"
        )


def _with_checks(captured: Captured, rules: StepRules, alone: bool) -> Captured:
    """Return the capture of a step with data-dependent branches, whose deciding values come before
    the loss among its outputs.

    Raises:
        CaptureError: a branch that goes the other way does not just raise an error, in a step that
            cannot run without its plan.
    """
    count = values_of(captured.assumed)
    if not count:
        return captured
    other = next((one for one in captured.assumed if not one.raises), None)
    if other is not None and (rules.micro_batches > 1 or rules.scaled or not alone):
        raise CaptureError(
            f"the step has a data-dependent branch ({other.shown}), and a train step of several "
            "micro-batches, with a GradScaler or on several ranks cannot run again without its "
            "plan when the branch goes another way than planned: plan the module alone "
            "(memopt.plan(model, inputs) and plan.apply, or memopt.wrap), which can"
        )
    *before, loss = captured.forward_outputs[:-count]
    if rules.micro_batches == 1:
        ordered = (*before, *captured.forward_outputs[-count:], loss)
        leaves = replace(captured.outputs, count=count)
        return replace(captured, forward_outputs=ordered, outputs=leaves)
    warn(
        f"a step of several micro-batches leaves out the checks of values in its forward "
        f"({captured.assumed[0].shown}): check the inputs before the step"
    )
    return replace(captured, forward_outputs=(*before, loss), assumed=())


def _check_registered(captured: Captured) -> None:
    """Refuse a step that trains a tensor which the model does not register: no update ends the
    gradient's lifetime, and eager would keep it."""
    for primal, gradient in zip(captured.primals, captured.gradients, strict=True):
        constant = primal.constant
        if constant is not None and constant.requires_grad and isinstance(gradient, Node):
            source = captured.dependencies.source_of(constant) or "a tensor of the model's"
            name = re.sub(r"^global_\d+\.|(?<=model\.)model\.", "", python_name(source))
            raise CaptureError(
                f"the step trains {name} (shape {list(constant.shape)}), which the model does not "
                "register, and a train step updates registered parameters alone: make it an "
                "attribute of its own or keep such tensors in an nn.ParameterList, or plan the "
                "module alone (memopt.plan(model, inputs) and plan.apply, or memopt.wrap)"
            )


def _trained_positions(
    module: StepModule, captured: Captured, ranks: dict[str, int], rules: StepRules
) -> list[int]:
    """Return the positions of the trained primals, in the order of the model's parameters.

    Raises:
        ValueError: clipping meets a gradient that no update reads, a scaler a float16 parameter, or
            nothing is trained.
    """
    pairs = zip(captured.primals, captured.gradients, strict=True)
    positions = {
        primal.name: i
        for i, (primal, gradient) in enumerate(pairs)
        if isinstance(gradient, Node) and primal.kind == "parameter"
    }
    for name in positions:
        if rules.clip_norm is not None and name not in ranks:
            raise ValueError(
                f"clip_norm= is for models whose gradients all end in updates, but the optimizer "
                f"does not train {name.removeprefix('model.')}: freeze it (requires_grad_(False)), "
                "or give it to the optimizer"
            )
    named = [name for name, _ in module.named_parameters() if name in positions and name in ranks]
    found = [positions[name] for name in named]
    if not found:
        raise ValueError(
            "clip_norm= and scaler= need gradients: the optimizer trains nothing that the loss "
            "depends on"
        )
    half = [name for name, parameter in module.named_parameters() if parameter.dtype is _HALF]
    if rules.scaled and half:
        raise ValueError(
            f"a GradScaler refuses float16 gradients, as that of {half[0].removeprefix('model.')}: "
            "keep parameters in float32 and run the step under torch.autocast"
        )
    return found


def with_updates(
    parts: StepParts, lowering: Lowering, costs: dict[str, tuple[float, int]]
) -> tuple[Captured, Lowering]:
    """Append the update operators at the step's end, in the optimizer's order.

    Args:
        parts: the captured step.
        lowering: `parts.lowering`, its graph priced or not.
        costs: parameter name → (seconds, workspace bytes) of its update.
    """
    sites = parts.sites
    gone = {site.gradient for site in sites}
    updated = {site.name for site in sites}
    gradients = tuple(
        None if p.name in updated and g in gone else g
        for p, g in zip(parts.captured.primals, parts.captured.gradients, strict=True)
    )
    captured = replace(parts.captured, gradients=gradients)
    fx_graph = captured.module.graph
    output = fx_graph.output_node()
    for before in fx_graph.find_nodes(op="call_function", target=parts.update):
        fx_graph.erase_node(before)  # left by an earlier call, with other costs
    checked: dict[str, Any] = {} if parts.largest is None else {"largest": parts.largest}
    nodes, operators, storages = [], [], dict(lowering.storages)
    for site in sites:
        with fx_graph.inserting_before(output):
            node = fx_graph.create_node(
                "call_function", parts.update, site.arguments, checked, name="update"
            )
        storages[node] = ()
        nodes.append(node)
        time_s, workspace_bytes = costs.get(site.name, (0.0, 0))
        operators.append(
            Operator(
                name=update_name(site),
                reads=site.reads,
                writes=(),
                time_s=time_s,
                workspace_bytes=workspace_bytes,
                phase=Phase.UPDATE,
                recomputable=False,
                module=site.name.removeprefix("model.").rpartition(".")[0],
                target="update",
            )
        )
    graph = lowering.graph
    remaining = held_by((*gradients, *captured.other_results), lowering.storages)
    every = (*graph.operators, *operators)
    # Whoever runs the step writes new values of buffers back at its end.
    graph = replace(graph, operators=every, gradients=remaining, written_back=())
    return captured, replace(
        lowering, graph=graph, nodes=(*lowering.nodes, *nodes), storages=storages
    )


_SCATTER = collectives().reduce_scatter_tensor.default
_REDUCE = collectives().all_reduce.default
_PACKS = frozenset(
    {
        _ATEN._chunk_cat.default,
        _ATEN.cat.default,
        _ATEN.constant_pad_nd.default,
        _ATEN.split.Tensor,
        operator.getitem,
    }
)


def reductions(captured: Captured) -> tuple[Node, ...]:
    """Return, in their order, the calls that average gradients over the ranks, that pack gradients
    for these, and that unpack the averages. Several micro-batches share them, as FSDP2 does after
    `set_requires_gradient_sync(False)`.

    A reduction begins where gradients are packed, padded or cut for it. What comes in there has the
    dtype in which it is averaged, and is what FSDP2 adds up. Packing moves elements and adds
    nothing: packed sums are sums of what was packed.

    Args:
        captured: a step of a model that `memopt.shard` has spread over ranks.
    """
    wanted = [one for one in captured.gradients if isinstance(one, Node)]
    sends = [one for one in _reached(wanted, lambda node: node.all_input_nodes) if _averages(one)]
    found = {*sends, *(after for one in sends for after in _after(one))}
    stack = [*sends]
    while stack:
        for one in stack.pop().all_input_nodes:
            if one not in found and one.target in _PACKS and found.issuperset(one.users):
                found.add(one)
                stack.append(one)
    return tuple(sorted(found))


def _averages(node: Node) -> bool:
    """Return whether a call averages a gradient. (A model's own collectives add, or their results
    are scattered or used in another way.)"""
    if node.target not in (_SCATTER, _REDUCE) or node.args[1] != "avg":
        return False
    targets = {one.target for one in _after(node)}
    return targets <= AFTER_SCATTER


def _after(node: Node) -> set[Node]:
    """Return the calls that depend on one."""
    found = _reached([node], lambda one: [user for user in one.users if user.op != "output"])
    return found - {node}


def _reached(nodes: Iterable[Node], following: Callable[[Node], list[Node]]) -> set[Node]:
    """Return nodes, and what follows them."""
    stack = [*nodes]
    found = set(stack)
    while stack:
        more = [one for one in following(stack.pop()) if one not in found]
        found.update(more)
        stack += more
    return found
