"""Attention to a context that several ranks share, as torch's `context_parallel` computes it.

Each rank has a part of the sequence. All ranks' keys are gathered beside the first part's work; in
the backward a part's slopes are sent on in float32 beside the next part's. The causal mask's work
is balanced among the ranks (torch/distributed/tensor/experimental/_attention.py). Under
`torch.compile` nothing of this is beside anything: a traced collective is waited for at once
(`_maybe_wrap_tensor` of torch/distributed/_functional_collectives.py), and Inductor moves no wait.
"""

from __future__ import annotations

from dataclasses import replace

from memopt.models.collective import Collective, CollectiveKind
from memopt.models.device import Device
from memopt.models.graph import Graph, Operator, Phase

FUSED = "_scaled_dot_product"
"""In the target of an attention whose scores are never whole."""


def ring_s(
    time_s: float,
    keys_bytes: int,
    ranks: int,
    stride: int,
    backward: bool,
    device: Device,
    compiled: bool = False,
) -> float:
    """Return the seconds of an attention to the keys of a whole context.

    Args:
        time_s: to the keys of one rank.
        keys_bytes: of all ranks' keys and values, in half precision.
        ranks: that share the context.
        stride: between them.
        backward: whether it is the backward.
        device: with its network.
        compiled: whether `torch.compile` traces it.
    """
    gather = Collective(CollectiveKind.ALL_GATHER, ranks, keys_bytes, stride)
    gather_s = device.collective_time_s(gather)
    sent_s = 2 * gather_s / (ranks - 1)
    if compiled:
        return ranks * time_s + gather_s + backward * ranks * sent_s
    first_s = max(time_s, gather_s)
    if not backward:
        return first_s + (ranks - 1) * time_s
    return first_s + (ranks - 1) * max(time_s, sent_s) + sent_s


def in_context(graph: Graph, ranks: int, stride: int, device: Device) -> Graph:
    """Return a graph of one part of a sequence, whose attentions meet the keys of `ranks` parts;
    those are charged as their workspace.

    Raises:
        ValueError: it has no fused attention.
    """
    keys: dict[str, int] = {}
    found: list[Operator] = []
    for operator in graph.operators:
        if FUSED not in operator.target:
            found.append(operator)
            continue
        backward = operator.phase is Phase.BACKWARD
        if not backward:
            read = [graph.tensors[one].size_bytes for one in operator.reads]
            result = max(graph.tensors[one].size_bytes for one in operator.writes)
            keys[operator.module] = ranks * max(0, sum(read) - result)
        size = keys[operator.module]
        time_s = ring_s(operator.time_s, size, ranks, stride, backward, device)
        more = operator.workspace_bytes + size
        found.append(replace(operator, time_s=time_s, workspace_bytes=more))
    if not keys:
        raise ValueError("it has no fused attention (scaled_dot_product_attention)")
    return replace(graph, operators=tuple(found))
