"""Attention's backward written out: some rows at a time, or all, from the inputs alone.

With P = softmax(scale·Q·Kᵀ + mask), O = P·V and dP = dO·Vᵀ:

    dV = Pᵀ·dO,   dS = P∘(dP − rowsum(P∘dP)),   dQ = scale·dS·K,   dK = scale·dSᵀ·Q

where rowsum(P∘dP) = rowsum(dO∘O), for which the fused kernel reads O, and the rows' log-sum-exp for
P. A forward written out takes longer than the fused one, and more memory: there is none.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from memopt.kernels.kernel import Kernel, split
from memopt.kernels.site import Sites, value_of

BACKWARD_TARGET = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
CHUNKS = 8
"""Number of row chunks, for implementations that never hold all probabilities at once."""


class _Attention(NamedTuple):
    """Arguments of attention: q, k and v are [images, heads, rows, features]."""

    q: Any
    k: Any
    v: Any
    causal: Any
    mask: Any
    scale: Any

    @property
    def wide(self) -> torch.dtype:
        """Dtype of the computation: float32 at least."""
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def factor(self) -> Any:
        """Factor of the scores."""
        return 1 / math.sqrt(self.q.shape[-1]) if self.scale is None else self.scale

    def scores(self, rows: slice) -> Tensor:
        """Compute the masked scores of some rows."""
        q, k, mask = self.q, self.k, self.mask
        keys = k.to(self.wide).transpose(-1, -2)
        found: Tensor = (q[:, :, rows].to(self.wide) * self.factor) @ keys
        if self.causal:
            first = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
            found.masked_fill_(torch.arange(k.shape[2], device=q.device) > first, -math.inf)
        if mask is None:
            return found
        some = mask.expand(*found.shape[:2], q.shape[2], k.shape[2])[:, :, rows]
        if mask.dtype == torch.bool:
            return found.masked_fill_(~some, -math.inf)
        return found.add_(some)


def _backward(
    chunks: int, strides: tuple[Any, Any, Any], g: Tensor, *given: Any
) -> tuple[Tensor, ...]:
    one = _Attention(*given)
    q, k, v, wide = one.q, one.k, one.v, one.wide
    found = tuple(x.new_empty_strided(x.shape, s) for x, s in zip((q, k, v), strides, strict=True))
    dk, dv = k.new_zeros(k.shape, dtype=wide), v.new_zeros(v.shape, dtype=wide)
    for rows in split(q.shape[2], chunks):
        # Rows that are masked whole are 0.
        p = torch.softmax(one.scores(rows), -1).nan_to_num_(0.0)
        some = g[:, :, rows].to(wide)
        dv += p.transpose(-1, -2) @ some
        ds = some @ v.to(wide).transpose(-1, -2)
        ds.sub_((p * ds).sum(-1, keepdim=True)).mul_(p).mul_(one.factor)
        found[0][:, :, rows] = (ds @ k.to(wide)).to(q.dtype)
        dk += ds.transpose(-1, -2) @ q[:, :, rows].to(wide)
    found[1].copy_(dk)
    found[2].copy_(dv)
    return found


BACKWARD = Kernel("attention_backward.rows", _backward)


def _known(forward: Node) -> _Attention | None:
    """Return the arguments of a call without dropout and with equal numbers of heads, else None."""
    q, k, v, *given = forward.args
    causal = given[1] if len(given) > 1 else False
    if any(given[:1]) or len({value_of(x).shape[1] for x in (q, k, v)}) > 1:
        return None
    more = forward.kwargs
    return _Attention(q, k, v, causal, more.get("attn_mask"), more.get("scale"))


def attach(sites: Sites) -> None:
    """Attach alternatives to the backward of fused attention: to the operator in which steps on the
    CPU, and estimates, are captured."""
    for forward, backward in sites.pairs(BACKWARD_TARGET, 5):
        known = _known(forward)
        gradients = tuple(sites.result(backward, i) for i in range(3))
        if known is None or None in gradients:
            continue
        q, k, v = (value_of(x) for x in known[:3])
        width = max(4, q.element_size())
        scores = q.numel() // q.shape[-1] * k.shape[2] * width
        both = (k.numel() + v.numel()) * width
        strides = tuple(tuple(x.stride()) for x in value_of(backward))
        for name, chunks in (("math", 1), ("inputs", CHUNKS)):
            sites.add(
                backward,
                name,
                BACKWARD,
                (chunks, strides, backward.args[0], *known),
                gradients,
                workspace_bytes=3 * -(-scores // chunks) + 2 * both,
                exact=False,
                like=1.0,
                moved_bytes=8 * scores,
            )
