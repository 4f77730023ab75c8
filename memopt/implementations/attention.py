"""Attention written out: probabilities of some rows at a time in place of the fused kernel, and a
backward that needs neither the output nor the rows' logarithms of sums.

With P = softmax(scale·Q·Kᵀ + mask), O = P·V and dP = dO·Vᵀ:

    dV = Pᵀ·dO,   dS = P∘(dP − rowsum(P∘dP)),   dQ = scale·dS·K,   dK = scale·dSᵀ·Q

where rowsum(P∘dP) = rowsum(dO∘O), which the fused kernel reads O for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from memopt.implementations.kernel import Kernel
from memopt.implementations.site import Sites, value_of

FORWARD_TARGET = "aten._scaled_dot_product_flash_attention_for_cpu.default"
BACKWARD_TARGET = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
CHUNKS = 8
"""Of the rows, for the implementations that never have all probabilities at once."""


def _parts(rows: int, chunks: int) -> Iterator[slice]:
    step = max(1, -(-rows // chunks))
    return (slice(i, min(i + step, rows)) for i in range(0, rows, step))


def _scores(
    q: torch.Tensor, k: torch.Tensor, rows: slice, causal: bool, mask: Any, scale: Any
) -> torch.Tensor:
    """Of some rows, masked, in float32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    found = (q[:, :, rows].to(wide) * factor) @ k.to(wide).transpose(-1, -2)
    if causal:
        first = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
        found.masked_fill_(torch.arange(k.shape[2], device=q.device) > first, -math.inf)
    if mask is None:
        return found
    some = mask.expand(*found.shape[:2], q.shape[2], k.shape[2])[:, :, rows]
    if mask.dtype == torch.bool:
        return found.masked_fill_(~some, -math.inf)
    return found.add_(some)


def _probabilities(scores: torch.Tensor) -> torch.Tensor:
    """Rows that are masked whole are 0."""
    return torch.softmax(scores, -1).nan_to_num_(0.0)


def _forward(
    chunks: int,
    strides: tuple[Any, Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    mask: Any,
    scale: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty_strided((*q.shape[:3], v.shape[-1]), strides[0])
    sums = q.new_empty_strided(q.shape[:3], strides[1], dtype=wide)
    for rows in _parts(q.shape[2], chunks):
        scores = _scores(q, k, rows, causal, mask, scale)
        sums[:, :, rows] = torch.logsumexp(scores, -1)
        out[:, :, rows] = (_probabilities(scores) @ v.to(wide)).to(q.dtype)
    return out, sums


def _backward(
    chunks: int,
    strides: tuple[Any, Any, Any],
    g: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    mask: Any,
    scale: Any,
) -> tuple[torch.Tensor, ...]:
    wide = torch.promote_types(q.dtype, torch.float32)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    found = tuple(x.new_empty_strided(x.shape, s) for x, s in zip((q, k, v), strides, strict=True))
    dk, dv = k.new_zeros(k.shape, dtype=wide), v.new_zeros(v.shape, dtype=wide)
    for rows in _parts(q.shape[2], chunks):
        p = _probabilities(_scores(q, k, rows, causal, mask, scale))
        some = g[:, :, rows].to(wide)
        dv += p.transpose(-1, -2) @ some
        ds = some @ v.to(wide).transpose(-1, -2)
        ds.sub_((p * ds).sum(-1, keepdim=True)).mul_(p).mul_(factor)
        found[0][:, :, rows] = (ds @ k.to(wide)).to(q.dtype)
        dk += ds.transpose(-1, -2) @ q[:, :, rows].to(wide)
    found[1].copy_(dk)
    found[2].copy_(dv)
    return found


FORWARD = Kernel("attention.rows", _forward)
BACKWARD = Kernel("attention_backward.rows", _backward)
NAMES = (("math", 1), ("chunked", CHUNKS))


def _known(forward: Node) -> tuple[Any, Any, Any, Any, Any, Any] | None:
    """(q, k, v, causal, mask, scale) of a call without dropout and with as many heads in each."""
    q, k, v, *more = forward.args
    dropout = more[0] if more else 0.0
    causal = more[1] if len(more) > 1 else False
    heads = {value_of(x).shape[1] for x in (q, k, v)}
    if dropout or len(heads) > 1:
        return None
    return q, k, v, causal, forward.kwargs.get("attn_mask"), forward.kwargs.get("scale")


def attach(sites: Sites) -> None:
    """The fused attention that a step is captured with on the CPU, and in estimates."""
    for backward in sites.calls(BACKWARD_TARGET):
        forward = sites.producer(backward.args[5])
        known = None if forward is None else _known(forward)
        if forward is None or known is None:
            continue
        q, k, v, *_ = known
        rows = value_of(q).numel() // value_of(q).shape[-1]
        wide = max(4, value_of(q).element_size())
        scores = rows * value_of(k).shape[2] * wide
        results = tuple(sites.result(forward, i) for i in range(2))
        gradients = tuple(sites.result(backward, i) for i in range(3))
        if None in results or None in gradients:
            continue
        out_strides = tuple(tuple(x.stride()) for x in value_of(forward))
        strides = tuple(tuple(x.stride()) for x in value_of(backward))
        both = sum(value_of(x).numel() for x in (k, v)) * wide
        for name, chunks in NAMES:
            part = -(-scores // chunks)
            sites.add(
                forward,
                name,
                FORWARD,
                (chunks, out_strides, *known),
                results,
                workspace_bytes=3 * part + both,
                exact=False,
                like=((forward, 1.0),),
                moved_bytes=6 * scores,
            )
            sites.add(
                backward,
                "inputs" if chunks > 1 else name,
                BACKWARD,
                (chunks, strides, backward.args[0], *known),
                gradients,
                workspace_bytes=3 * part + 2 * both,
                exact=False,
                like=((backward, 1.0),),
                moved_bytes=8 * scores,
            )
