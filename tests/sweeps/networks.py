"""Layers of networks: convolutions, pooling, norms, attention, resampling, losses."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.sweeps.subjects import Entry, Table

CONVOLUTIONS: Table = {
    "conv2d": Entry(
        lambda h, g, k: F.conv2d(h, k.param("w", 5, 4, 3, 3), k.param("b", 5)), "image"
    ),
    "conv2d padding": Entry(
        lambda h, g, k: F.conv2d(h, k.param("w", 5, 4, 3, 3), padding=1), "image"
    ),
    "conv2d stride": Entry(
        lambda h, g, k: F.conv2d(h, k.param("w", 5, 4, 3, 3), stride=2, padding=1), "image"
    ),
    "conv2d 1x1": Entry(lambda h, g, k: F.conv2d(h, k.param("w", 5, 4, 1, 1)), "image"),
    "conv2d groups": Entry(
        lambda h, g, k: F.conv2d(h, k.param("w", 6, 2, 3, 3), groups=2), "image"
    ),
    "conv2d depthwise": Entry(
        lambda h, g, k: F.conv2d(h, k.param("w", 4, 1, 3, 3), padding=1, groups=4), "image"
    ),
    "conv2d dilated": Entry(
        lambda h, g, k: F.conv2d(h, k.param("w", 5, 4, 3, 3), dilation=2, padding=2), "image"
    ),
    "conv2d same": Entry(
        lambda h, g, k: F.conv2d(h, k.param("w", 5, 4, 3, 2), padding="same"), "image"
    ),
    "conv1d": Entry(
        lambda h, g, k: F.conv1d(h, k.param("w", 5, 4, 3), k.param("b", 5)), "sequence"
    ),
    "conv1d stride": Entry(
        lambda h, g, k: F.conv1d(h, k.param("w", 5, 4, 4), stride=2, padding=1), "sequence"
    ),
    "conv3d": Entry(lambda h, g, k: F.conv3d(h, k.param("w", 5, 4, 3, 3, 3), padding=1), "volume"),
    "conv_transpose2d": Entry(
        lambda h, g, k: F.conv_transpose2d(h, k.param("w", 4, 3, 3, 3), stride=2), "image"
    ),
    "conv_transpose1d": Entry(
        lambda h, g, k: F.conv_transpose1d(h, k.param("w", 4, 3, 3), stride=2), "sequence"
    ),
    "conv_transpose3d": Entry(
        lambda h, g, k: F.conv_transpose3d(h, k.param("w", 4, 3, 2, 2, 2)), "volume"
    ),
    "conv relu conv": Entry(
        lambda h, g, k: F.conv2d(
            F.conv2d(h, k.param("w", 4, 4, 3, 3), padding=1).relu_(), k.param("v", 3, 4, 1, 1)
        ),
        "image",
    ),
    "unfold (im2col)": Entry(lambda h, g, k: F.unfold(h, 3, padding=1), "image"),
    "fold": Entry(lambda h, g, k: F.fold(F.unfold(h, 2, stride=2), (6, 6), 2, stride=2), "image"),
    "grid_sample": Entry(
        lambda h, g, k: F.grid_sample(h, g[:, :2].movedim(1, -1), align_corners=False),
        "image",
        "small",
    ),
    "grid_sample nearest": Entry(
        lambda h, g, k: F.grid_sample(
            h, g[:, :2].movedim(1, -1), mode="nearest", padding_mode="border", align_corners=True
        ),
        "image",
        "small",
    ),
    "grid_sample bicubic": Entry(
        lambda h, g, k: F.grid_sample(
            h, g[:, :2].movedim(1, -1), mode="bicubic", align_corners=True
        ),
        "image",
        "small",
    ),
    "grid_sample 3d": Entry(
        lambda h, g, k: F.grid_sample(h, g[:, :3].movedim(1, -1), align_corners=True),
        "volume",
        "small",
    ),
    "affine_grid": Entry(
        lambda h, g, k: F.affine_grid(h[:, :2, :3], [2, 3, 4, 5], False), "square"
    ),
    "pixel_shuffle": Entry(lambda h, g, k: F.pixel_shuffle(h, 2).sin(), "image"),
    "pixel_unshuffle": Entry(lambda h, g, k: F.pixel_unshuffle(h, 2).sin(), "image"),
    "channel_shuffle": Entry(lambda h, g, k: F.channel_shuffle(h, 2).sin(), "image"),
}

_RESIZE = {
    "nearest": ("image", {}),
    "nearest-exact": ("image", {}),
    "bilinear": ("image", {}),
    "bicubic": ("image", {}),
    "area": ("image", {}),
    "linear": ("sequence", {}),
    "trilinear": ("volume", {}),
}

POOLING: Table = {
    **{
        f"interpolate {mode}{suffix}": Entry(
            lambda h, g, k, mode=mode, more=more: F.interpolate(h, mode=mode, **more), form
        )
        for mode, (form, _) in _RESIZE.items()
        for suffix, more in ((" up", {"scale_factor": 2}), (" 1.5", {"scale_factor": 1.5}))
    },
    "interpolate bilinear corners": Entry(
        lambda h, g, k: F.interpolate(h, size=(9, 7), mode="bilinear", align_corners=True), "image"
    ),
    "interpolate antialias": Entry(
        lambda h, g, k: F.interpolate(h, size=(3, 4), mode="bilinear", antialias=True), "image"
    ),
    "max_pool2d": Entry(lambda h, g, k: F.max_pool2d(h, 2), "image"),
    "max_pool2d 3 1": Entry(lambda h, g, k: F.max_pool2d(h, 3, 1, 1), "image"),
    "max_pool2d indices": Entry(lambda h, g, k: F.max_pool2d(h, 2, return_indices=True), "image"),
    "max_pool1d": Entry(lambda h, g, k: F.max_pool1d(h, 2), "sequence"),
    "max_pool3d": Entry(lambda h, g, k: F.max_pool3d(h, 2), "volume"),
    "avg_pool2d": Entry(lambda h, g, k: F.avg_pool2d(h, 2), "image"),
    "avg_pool2d 3 pad": Entry(
        lambda h, g, k: F.avg_pool2d(h, 3, 2, 1, count_include_pad=False), "image"
    ),
    "avg_pool1d": Entry(lambda h, g, k: F.avg_pool1d(h, 3, 2), "sequence"),
    "avg_pool3d": Entry(lambda h, g, k: F.avg_pool3d(h, 2), "volume"),
    "adaptive_avg_pool2d": Entry(lambda h, g, k: F.adaptive_avg_pool2d(h, (3, 2)), "image"),
    "adaptive_avg_pool2d 1": Entry(lambda h, g, k: F.adaptive_avg_pool2d(h, 1), "image"),
    "adaptive_avg_pool1d": Entry(lambda h, g, k: F.adaptive_avg_pool1d(h, 5), "sequence"),
    "adaptive_avg_pool3d": Entry(lambda h, g, k: F.adaptive_avg_pool3d(h, 2), "volume"),
    "adaptive_max_pool2d": Entry(lambda h, g, k: F.adaptive_max_pool2d(h, (3, 2)), "image"),
    "adaptive_max_pool1d": Entry(lambda h, g, k: F.adaptive_max_pool1d(h, 5), "sequence"),
    "lp_pool2d": Entry(lambda h, g, k: F.lp_pool2d(h, 2, 2), "image"),
    "max_unpool2d": Entry(
        lambda h, g, k: F.max_unpool2d(*F.max_pool2d(h, 2, return_indices=True), 2), "image"
    ),
}

NORMS: Table = {
    "batch_norm": Entry(lambda h, g, k: k.layer("n", nn.BatchNorm2d, 4)(h), "image"),
    "batch_norm plain": Entry(
        lambda h, g, k: k.layer("n", nn.BatchNorm2d, 4, affine=False)(h), "image"
    ),
    "batch_norm no stats": Entry(
        lambda h, g, k: k.layer("n", nn.BatchNorm2d, 4, track_running_stats=False)(h), "image"
    ),
    "batch_norm frozen": Entry(
        lambda h, g, k: F.batch_norm(
            h, k.param("m", 4).detach(), k.param("m", 4).detach().abs() + 1
        ),
        "image",
    ),
    "batch_norm 1d rows": Entry(lambda h, g, k: k.layer("n", nn.BatchNorm1d, 8)(h), "rows"),
    "batch_norm 1d": Entry(lambda h, g, k: k.layer("n", nn.BatchNorm1d, 4)(h), "sequence"),
    "batch_norm 3d": Entry(lambda h, g, k: k.layer("n", nn.BatchNorm3d, 4)(h), "volume"),
    "batch_norm of a sequence": Entry(
        lambda h, g, k: k.layer("n", nn.BatchNorm1d, 12)(h.transpose(1, 2)).transpose(1, 2).relu(),
        "sequence",
    ),
    "batch_norm twice": Entry(
        lambda h, g, k: k.layer("n", nn.BatchNorm1d, 4)(k.layer("n", nn.BatchNorm1d, 4)(h) * 0.5),
        "sequence",
    ),
    "batch_norm chunk": Entry(
        lambda h, g, k: k.layer("n", nn.BatchNorm1d, 4)(h.chunk(2, -1)[1]).relu(), "rows"
    ),
    "batch_norm relu": Entry(
        lambda h, g, k: k.layer("n", nn.BatchNorm2d, 4)(h).relu_() + g, "image"
    ),
    "layer_norm": Entry(lambda h, g, k: k.layer("n", nn.LayerNorm, 6)(h)),
    "layer_norm two": Entry(lambda h, g, k: k.layer("n", nn.LayerNorm, [5, 6])(h)),
    "layer_norm plain": Entry(lambda h, g, k: F.layer_norm(h, (6,))),
    "rms_norm": Entry(lambda h, g, k: F.rms_norm(h, (6,), k.param("w", 6))),
    "group_norm": Entry(lambda h, g, k: k.layer("n", nn.GroupNorm, 2, 4)(h), "image"),
    "group_norm sequence": Entry(lambda h, g, k: k.layer("n", nn.GroupNorm, 4, 4)(h), "sequence"),
    "instance_norm": Entry(lambda h, g, k: F.instance_norm(h), "image"),
    "instance_norm affine": Entry(
        lambda h, g, k: k.layer("n", nn.InstanceNorm2d, 4, affine=True)(h), "image"
    ),
    "instance_norm tracked": Entry(
        lambda h, g, k: k.layer("n", nn.InstanceNorm2d, 4, track_running_stats=True)(h), "image"
    ),
    "local_response_norm": Entry(lambda h, g, k: F.local_response_norm(h, 2), "image"),
    "weight_norm": Entry(
        lambda h, g, k: h @ torch._weight_norm(k.param("v", 6, 6), k.param("s", 6, 1), 0)
    ),
}


def _attend(h, g, **more):  # type: ignore[no-untyped-def]  # a table's row
    return F.scaled_dot_product_attention(h, g, h + g, **more)


ATTENTION: Table = {
    "attention": Entry(lambda h, g, k: _attend(h, g), "heads"),
    "attention causal": Entry(lambda h, g, k: _attend(h, g, is_causal=True), "heads"),
    "attention mask": Entry(
        lambda h, g, k: _attend(h, g, attn_mask=k.bools("m", 6, 6) | torch.eye(6).bool()), "heads"
    ),
    "attention float mask": Entry(
        lambda h, g, k: _attend(h, g, attn_mask=k.ints("m", 3, 6, 6).float()), "heads"
    ),
    "attention trained mask": Entry(
        lambda h, g, k: _attend(h, g, attn_mask=k.param("m", 4, 6, 6)), "heads"
    ),
    "attention scale": Entry(lambda h, g, k: _attend(h, g, scale=0.2), "heads"),
    "attention 3d": Entry(lambda h, g, k: _attend(h, g), "square"),
    "attention by hand": Entry(lambda h, g, k: (h @ g.mT / 8**0.5).softmax(-1) @ (h + g), "heads"),
    "attention einsum": Entry(
        lambda h, g, k: torch.einsum(
            "bhqk,bhkd->bqhd", torch.einsum("bhqd,bhkd->bhqk", h, g).softmax(-1), h
        ),
        "heads",
    ),
    "multihead attention": Entry(
        lambda h, g, k: k.layer("a", nn.MultiheadAttention, 12, 2, batch_first=True)(h, g, g)[0],
        "sequence",
    ),
    "multihead attention weights": Entry(
        lambda h, g, k: k.layer("a", nn.MultiheadAttention, 12, 2)(h, g, g), "sequence"
    ),
    "transformer layer": Entry(
        lambda h, g, k: k.layer(
            "t", nn.TransformerEncoderLayer, 12, 2, 16, dropout=0.0, batch_first=True
        )(h),
        "sequence",
    ),
    "lstm": Entry(lambda h, g, k: k.layer("l", nn.LSTM, 12, 5)(h)[0], "sequence"),
    "lstm cell": Entry(lambda h, g, k: k.layer("l", nn.LSTMCell, 8, 5)(h), "rows"),
    "gru cell": Entry(lambda h, g, k: k.layer("l", nn.GRUCell, 8, 5)(h), "rows"),
    "rnn": Entry(lambda h, g, k: k.layer("l", nn.RNN, 12, 5)(h)[0], "sequence"),
    "rnn cell": Entry(lambda h, g, k: k.layer("l", nn.RNNCell, 8, 5)(h), "rows"),
    "rotary": Entry(
        lambda h, g, k: h * 0.8 + torch.cat([-h[..., 4:], h[..., :4]], -1) * 0.6, "heads"
    ),
    "linear shared": Entry(
        lambda h, g, k: k.layer("l", nn.Linear, 6, 6)(k.layer("l", nn.Linear, 6, 6)(h).relu())
    ),
    "linear shared two": Entry(
        lambda h, g, k: (k.layer("l", nn.Linear, 6, 6)(h), k.layer("l", nn.Linear, 6, 6)(g))
    ),
    "linear shared three": Entry(
        lambda h, g, k: (
            k.layer("l", nn.Linear, 6, 6)(h)
            + k.layer("l", nn.Linear, 6, 6)(g)
            + k.layer("l", nn.Linear, 6, 6)(h * g)
        )
    ),
    "conv shared": Entry(
        lambda h, g, k: (
            F.conv2d(h, k.param("w", 4, 4, 3, 3), padding=1)
            + F.conv2d(g, k.param("w", 4, 4, 3, 3), padding=1)
        ),
        "image",
    ),
    "norm shared": Entry(
        lambda h, g, k: k.layer("n", nn.LayerNorm, 6)(h) + k.layer("n", nn.LayerNorm, 6)(g)
    ),
    "embedding tied": Entry(
        lambda h, g, k: (
            F.linear(h, F.embedding(k.ints("i", 7, 9), k.param("w", 7, 8)))
            @ (k.param("w", 7, 8).sum() * g.new_ones(9))
        ),
        "rows",
    ),
    "residual reuse": Entry(lambda h, g, k: h + F.linear(h, k.param("w", 6, 6)).tanh() + h * g),
}


def _pairs(function, **more):  # type: ignore[no-untyped-def]  # a table's row
    return Entry(lambda h, g, k: function(h, g, **more))


LOSSES: Table = {
    **{
        f"{name} {reduction}": _pairs(getattr(F, name), reduction=reduction)
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
        for reduction in ("mean", "sum", "none")
    },
    "huber 0.3": _pairs(F.huber_loss, delta=0.3),
    "smooth_l1 0.3": _pairs(F.smooth_l1_loss, beta=0.3),
    **{
        f"soft_margin {r}": Entry(
            lambda h, g, k, r=r: F.soft_margin_loss(h, g.detach().sign(), reduction=r)
        )
        for r in ("mean", "none")
    },
    **{
        f"bce {r}": Entry(
            lambda h, g, k, r=r: F.binary_cross_entropy(h, g.detach(), reduction=r), domain="unit"
        )
        for r in ("mean", "none")
    },
    "bce trained target": Entry(lambda h, g, k: F.binary_cross_entropy(h, g), domain="unit"),
    **{
        f"bce logits {r}": Entry(
            lambda h, g, k, r=r: F.binary_cross_entropy_with_logits(
                h, g.detach().sigmoid(), pos_weight=k.ints("p", 3, 6) + 1.0, reduction=r
            )
        )
        for r in ("mean", "none")
    },
    **{
        f"kl_div {r}": Entry(
            lambda h, g, k, r=r: F.kl_div(h.log_softmax(-1), g.softmax(-1), reduction=r)
        )
        for r in ("batchmean", "mean", "sum", "none")
    },
    "kl_div log": Entry(
        lambda h, g, k: F.kl_div(h, g.log_softmax(-1), log_target=True, reduction="sum")
    ),
    "kl_div plain": Entry(lambda h, g, k: F.kl_div(h, g), domain="unit"),
    **{
        f"cross_entropy {r}": Entry(
            lambda h, g, k, r=r: F.cross_entropy(h, k.ints("t", 4, 2, 5, 6), reduction=r)
        )
        for r in ("mean", "sum", "none")
    },
    "cross_entropy rows": Entry(lambda h, g, k: F.cross_entropy(h, k.ints("t", 8, 6)), "rows"),
    "cross_entropy smooth": Entry(
        lambda h, g, k: F.cross_entropy(h, k.ints("t", 8, 6), label_smoothing=0.1), "rows"
    ),
    "cross_entropy smooth weighted": Entry(
        lambda h, g, k: F.cross_entropy(
            h,
            k.ints("t", 8, 6),
            weight=k.ints("p", 3, 8) + 1.0,
            ignore_index=2,
            label_smoothing=0.1,
        ),
        "rows",
    ),
    "cross_entropy ignore": Entry(
        lambda h, g, k: F.cross_entropy(h, k.ints("t", 8, 6), ignore_index=0), "rows"
    ),
    "cross_entropy soft": Entry(lambda h, g, k: F.cross_entropy(h, g.softmax(1)), "rows"),
    "nll_loss": Entry(
        lambda h, g, k: F.nll_loss(
            h.log_softmax(-1), k.ints("t", 8, 6), weight=k.ints("p", 3, 8) + 1.0
        ),
        "rows",
    ),
    "poisson_nll": _pairs(F.poisson_nll_loss),
    "hinge_embedding": Entry(lambda h, g, k: F.hinge_embedding_loss(h, g.detach().sign())),
    "margin_ranking": Entry(
        lambda h, g, k: F.margin_ranking_loss(h, g, torch.ones(2, 4, 5, 6), margin=0.3)
    ),
    "cosine_embedding": Entry(
        lambda h, g, k: F.cosine_embedding_loss(h, g, torch.tensor([1, -1, 1, -1, 1, 1])), "rows"
    ),
    "triplet_margin": Entry(lambda h, g, k: F.triplet_margin_loss(h, g, h * g)),
    "multi_margin": Entry(lambda h, g, k: F.multi_margin_loss(h, k.ints("t", 8, 6)), "rows"),
    "multilabel_margin": Entry(
        lambda h, g, k: F.multilabel_margin_loss(h, k.ints("t", 8, 6, 8)), "rows"
    ),
    "multilabel_soft_margin": Entry(
        lambda h, g, k: F.multilabel_soft_margin_loss(h, k.bools("t", 6, 8).float()), "rows"
    ),
    "mse inner term": Entry(lambda h, g, k: (h.tanh().mean() + 0.1 * F.mse_loss(h, g), h.sin())),
}

TABLE: Table = {**CONVOLUTIONS, **POOLING, **NORMS, **ATTENTION, **LOSSES}
