"""Reductions, indexing, views and matrix operators."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.sweeps.subjects import Entry, Table

REDUCTIONS: Table = {
    **{
        f"{name} {dim}": Entry(
            lambda h, g, k, name=name, dim=dim: (
                getattr(h, name)() if dim == "all" else getattr(h, name)(dim)
            )
        )
        for name in ("sum", "mean", "prod", "std", "var", "norm", "amax", "amin", "logsumexp")
        for dim in (-1, 1, "all")
        if not (name == "logsumexp" and dim == "all") and not (name == "norm" and dim != "all")
    },
    "sum 0 2": Entry(lambda h, g, k: h.sum((0, 2))),
    "sum keepdim": Entry(lambda h, g, k: h.sum((1, 3), keepdim=True)),
    "mean 2 3": Entry(lambda h, g, k: h.mean((2, 3))),
    "mean double": Entry(lambda h, g, k: h.mean(1, dtype=torch.float64)),
    "var biased": Entry(lambda h, g, k: h.var((0, 2, 3), unbiased=False)),
    "std_mean": Entry(lambda h, g, k: torch.std_mean(h, -1)),
    "var_mean": Entry(lambda h, g, k: torch.var_mean(h, (0, 1))),
    "norm 1": Entry(lambda h, g, k: h.norm(1, -1)),
    "norm 2 dim": Entry(lambda h, g, k: h.norm(2, 1)),
    "norm 3": Entry(lambda h, g, k: h.norm(3, -1)),
    "norm inf": Entry(lambda h, g, k: h.norm(float("inf"), -1)),
    "norm 0.5": Entry(lambda h, g, k: h.norm(0.5, -1), domain="positive"),
    "norm dims": Entry(lambda h, g, k: h.norm(2, (1, 2))),
    "vector_norm": Entry(lambda h, g, k: torch.linalg.vector_norm(h, dim=(2, 3))),
    "vector_norm 3": Entry(lambda h, g, k: torch.linalg.vector_norm(h, 3)),
    "matrix_norm": Entry(lambda h, g, k: torch.linalg.matrix_norm(h)),
    "matrix_norm nuc": Entry(lambda h, g, k: torch.linalg.matrix_norm(h, "nuc"), "square"),
    "matrix_norm 2": Entry(lambda h, g, k: torch.linalg.matrix_norm(h, 2), "square"),
    "matrix_norm 1": Entry(lambda h, g, k: torch.linalg.matrix_norm(h, 1), "square"),
    "max": Entry(lambda h, g, k: h.max()),
    "min": Entry(lambda h, g, k: h.min()),
    "max dim": Entry(lambda h, g, k: tuple(h.max(-1))),
    "min dim": Entry(lambda h, g, k: tuple(h.min(1))),
    "median": Entry(lambda h, g, k: h.median()),
    "median dim": Entry(lambda h, g, k: tuple(h.median(-1))),
    "nanmedian": Entry(lambda h, g, k: h.nanmedian()),
    "mode": Entry(lambda h, g, k: tuple(h.mode(-1))),
    "quantile": Entry(lambda h, g, k: h.quantile(0.3, dim=1)),
    "kthvalue": Entry(lambda h, g, k: tuple(h.kthvalue(2, 1))),
    "topk": Entry(lambda h, g, k: tuple(h.topk(3, -1))),
    "topk 1": Entry(lambda h, g, k: tuple(h.topk(2, 1))),
    "sort": Entry(lambda h, g, k: tuple(h.sort(-1))),
    "sort 1": Entry(lambda h, g, k: tuple(h.sort(1, descending=True))),
    "argsort": Entry(lambda h, g, k: (h, h.argsort(-1))),
    "argmax": Entry(lambda h, g, k: (h, h.argmax(1), h.argmin(-1), h.argmax())),
    "msort": Entry(lambda h, g, k: h.msort()),
    "cumsum": Entry(lambda h, g, k: h.cumsum(-1)),
    "cumsum 1": Entry(lambda h, g, k: h.cumsum(1)),
    "cumprod": Entry(lambda h, g, k: h.cumprod(-1), domain="positive"),
    "cummax": Entry(lambda h, g, k: tuple(h.cummax(-1))),
    "cummin": Entry(lambda h, g, k: tuple(h.cummin(1))),
    "logcumsumexp": Entry(lambda h, g, k: h.logcumsumexp(-1)),
    "cumulative_trapezoid": Entry(lambda h, g, k: torch.cumulative_trapezoid(h, dim=-1)),
    "trapezoid": Entry(lambda h, g, k: torch.trapezoid(h, dim=1)),
    "nansum": Entry(lambda h, g, k: h.nansum(1)),
    "nanmean": Entry(lambda h, g, k: h.nanmean(1)),
    "count_nonzero": Entry(lambda h, g, k: (h, (h > 0).count_nonzero(1))),
    "any all": Entry(lambda h, g, k: (h, (h > 0).any(1), (h > -1).all(-1))),
    "aminmax": Entry(lambda h, g, k: tuple(h.aminmax(dim=1))),
    "renorm": Entry(lambda h, g, k: h.renorm(2, 1, 0.7)),
    "normalize": Entry(lambda h, g, k: F.normalize(h, dim=1)),
    "normalize -1": Entry(lambda h, g, k: F.normalize(h, dim=-1)),
    "diff": Entry(lambda h, g, k: h.diff(dim=-1)),
    "gradient": Entry(lambda h, g, k: torch.gradient(h, dim=2)[0]),
    "logaddexp sum": Entry(lambda h, g, k: torch.logaddexp(h, g).sum(1)),
    "sum of squares": Entry(lambda h, g, k: h.square().sum(-1).sqrt()),
    "mean square root": Entry(lambda h, g, k: h * torch.rsqrt(h.pow(2).mean(-1, True) + 1e-6)),
    "bincount-like one_hot": Entry(lambda h, g, k: h + F.one_hot(k.ints("i", 6, 5), 6)),
    "segment mean": Entry(lambda h, g, k: h.unflatten(-1, (2, 3)).mean(-1)),
}

INDEXING: Table = {
    "gather": Entry(lambda h, g, k: h.gather(-1, k.ints("i", 6, 2, 4, 5, 3))),
    "gather 1": Entry(lambda h, g, k: h.gather(1, k.ints("i", 4, 2, 2, 5, 6))),
    "take_along_dim": Entry(lambda h, g, k: h.take_along_dim(h.argsort(-1), -1)),
    "take": Entry(lambda h, g, k: h.take(k.ints("i", 60, 7))),
    "put": Entry(lambda h, g, k: h.put(k.ints("i", 60, 6), g.flatten()[:6])),
    "index_select": Entry(lambda h, g, k: h.index_select(1, k.ints("i", 4, 6))),
    "index_select 0": Entry(lambda h, g, k: h.index_select(0, k.ints("i", 2, 5))),
    "index": Entry(lambda h, g, k: h[:, k.ints("i", 4, 6)]),
    "index two": Entry(lambda h, g, k: h[k.ints("i", 2, 3), k.ints("j", 4, 3)]),
    "index apart": Entry(lambda h, g, k: h[:, k.ints("i", 4, 3), :, k.ints("j", 6, 3)]),
    "index bool rows": Entry(lambda h, g, k: h * k.bools("m", 2, 4, 5, 6)),
    "index_put": Entry(lambda h, g, k: h.index_put((k.ints("i", 2, 2),), g)),
    "index_put add": Entry(lambda h, g, k: h.index_put((k.ints("i", 2, 2),), g, accumulate=True)),
    "index_add": Entry(lambda h, g, k: h.index_add(1, k.ints("i", 4, 4), g, alpha=0.3)),
    "index_copy": Entry(lambda h, g, k: h.index_copy(0, torch.tensor([1, 0]), g)),
    "index_fill": Entry(lambda h, g, k: h.index_fill(1, torch.tensor([1, 3]), 0.3)),
    "index_reduce mean": Entry(lambda h, g, k: h.index_reduce(1, k.ints("i", 4, 4), g, "mean")),
    "scatter": Entry(lambda h, g, k: h.scatter(-1, k.ints("i", 6, 2, 4, 5, 2), g[..., :2])),
    "scatter value": Entry(lambda h, g, k: h.scatter(1, k.ints("i", 4, 2, 2, 5, 6), 0.4)),
    "scatter_add": Entry(lambda h, g, k: h.scatter_add(1, k.ints("i", 4, 2, 4, 5, 6), g)),
    "scatter_reduce sum": Entry(
        lambda h, g, k: h.scatter_reduce(1, k.ints("i", 4, 2, 4, 5, 6), g, "sum")
    ),
    "scatter_reduce amax": Entry(
        lambda h, g, k: h.scatter_reduce(1, k.ints("i", 4, 2, 4, 5, 6), g, "amax")
    ),
    "scatter_reduce mean": Entry(
        lambda h, g, k: h.scatter_reduce(1, k.ints("i", 4, 2, 4, 5, 6), g, "mean")
    ),
    "masked_scatter": Entry(lambda h, g, k: h.masked_scatter(k.bools("m", 2, 4, 5, 6), g)),
    "select": Entry(lambda h, g, k: h.select(1, 2) * 2),
    "narrow": Entry(lambda h, g, k: h.narrow(-1, 1, 3) * 2),
    "slice step": Entry(lambda h, g, k: h[:, 1:, ::2, 1::2] * 2),
    "slice_scatter": Entry(lambda h, g, k: torch.slice_scatter(h, g[:, :2], 1, 1, 3)),
    "select_scatter": Entry(lambda h, g, k: torch.select_scatter(h, g[:, 0], 1, 1)),
    "diagonal_scatter": Entry(lambda h, g, k: torch.diagonal_scatter(h, g[..., :5, 0], 0, 2, 3)),
    "embedding": Entry(lambda h, g, k: F.embedding(k.ints("i", 6, 3, 5), h), "rows"),
    "embedding padding": Entry(
        lambda h, g, k: F.embedding(k.ints("i", 6, 3, 5), h, padding_idx=2), "rows"
    ),
    "embedding_bag": Entry(lambda h, g, k: F.embedding_bag(k.ints("i", 6, 3, 5), h), "rows"),
    "embedding_bag sum": Entry(
        lambda h, g, k: F.embedding_bag(k.ints("i", 6, 3, 5), h, mode="sum"), "rows"
    ),
    "embedding_bag max": Entry(
        lambda h, g, k: F.embedding_bag(k.ints("i", 6, 3, 5), h, mode="max"), "rows"
    ),
    "tril": Entry(lambda h, g, k: h.tril()),
    "triu": Entry(lambda h, g, k: h.triu(1)),
    "roll": Entry(lambda h, g, k: h.roll(2, -1)),
    "roll two": Entry(lambda h, g, k: h.roll((1, 2), (1, 2))),
    "flip": Entry(lambda h, g, k: h.flip(1, -1)),
    "rot90": Entry(lambda h, g, k: h.rot90(1, (2, 3))),
    "repeat": Entry(lambda h, g, k: h.repeat(1, 2, 1, 1)),
    "repeat_interleave": Entry(lambda h, g, k: h.repeat_interleave(2, 1)),
    "tile": Entry(lambda h, g, k: h.tile(2)),
    "cat": Entry(lambda h, g, k: torch.cat([h, g, h], 1)),
    "cat -1": Entry(lambda h, g, k: torch.cat([h, g], -1)),
    "stack": Entry(lambda h, g, k: torch.stack([h, g], 1)),
    "hstack vstack": Entry(lambda h, g, k: (torch.hstack([h, g]), torch.vstack([h, g]))),
    "split": Entry(lambda h, g, k: tuple(v * 2 for v in h.split(2, 1))),
    "chunk": Entry(lambda h, g, k: [a * b for a, b in [h.chunk(2, -1)]]),
    "unbind": Entry(lambda h, g, k: [v.sin() for v in h.unbind(1)]),
    "unfold": Entry(lambda h, g, k: h.unfold(-1, 3, 2) * 2),
    "unfold overlap": Entry(lambda h, g, k: h.unfold(2, 3, 1).sin()),
    "as_strided": Entry(lambda h, g, k: h.contiguous().as_strided((3, 4), (4, 2)) * 2),
    "diagonal": Entry(lambda h, g, k: h.diagonal(0, 2, 3) * 2),
    "diag_embed": Entry(lambda h, g, k: h.diag_embed()),
    "diag": Entry(lambda h, g, k: h.diag(), "vector"),
    "diag matrix": Entry(lambda h, g, k: h.diag() * 2, "rows"),
    "trace": Entry(lambda h, g, k: h.trace(), "rows"),
    "movedim": Entry(lambda h, g, k: h.movedim(1, -1) * 2),
    "swapaxes": Entry(lambda h, g, k: h.swapaxes(0, 3).sin()),
    "reshape": Entry(lambda h, g, k: h.reshape(4, -1).sin()),
    "flatten": Entry(lambda h, g, k: h.flatten(1).sin()),
    "unflatten": Entry(lambda h, g, k: h.unflatten(-1, (2, 3)).sin()),
    "squeeze": Entry(lambda h, g, k: h[:, :1].squeeze(1).sin()),
    "expand": Entry(lambda h, g, k: h[:, :1].expand(2, 3, 5, 6).sin()),
    "broadcast_to": Entry(lambda h, g, k: h.broadcast_to(3, 2, 4, 5, 6).sin()),
    "meshgrid": Entry(
        lambda h, g, k: [v * 2 for v in torch.meshgrid(h, g, indexing="ij")], "vector"
    ),
    "cartesian_prod": Entry(lambda h, g, k: torch.cartesian_prod(h, g), "vector"),
    "block_diag": Entry(lambda h, g, k: torch.block_diag(h, g), "rows"),
    "searchsorted": Entry(lambda h, g, k: (h, torch.searchsorted(g.sort(-1)[0].detach(), h))),
    "bucketize": Entry(lambda h, g, k: (h, torch.bucketize(h, torch.tensor([-1.0, 0, 1])))),
    "constant_pad": Entry(lambda h, g, k: F.pad(h, (1, 2, 0, 1), value=0.5)),
    "pad negative": Entry(lambda h, g, k: F.pad(h, (-1, 1))),
    "pad reflect": Entry(lambda h, g, k: F.pad(h, (1, 2, 2, 1), mode="reflect"), "image"),
    "pad replicate": Entry(lambda h, g, k: F.pad(h, (1, 2, 2, 1), mode="replicate"), "image"),
    "pad circular": Entry(lambda h, g, k: F.pad(h, (1, 2, 2, 1), mode="circular"), "image"),
    "pad reflect 1d": Entry(lambda h, g, k: F.pad(h, (2, 3), mode="reflect"), "sequence"),
    "pad replicate 3d": Entry(
        lambda h, g, k: F.pad(h, (1, 1, 0, 2, 1, 0), mode="replicate"), "volume"
    ),
    "view_as_complex": Entry(
        lambda h, g, k: torch.view_as_complex(h.contiguous().unflatten(-1, (3, 2))) * 2
    ),
    "new_zeros": Entry(lambda h, g, k: h + h.new_zeros(6) + h.new_full((5, 1), 0.1)),
    "ones_like": Entry(lambda h, g, k: h + torch.ones_like(h) + torch.full_like(h, 0.2)),
    "zeros_like": Entry(lambda h, g, k: torch.zeros_like(h).copy_(h) * 2),
    "empty_like": Entry(lambda h, g, k: torch.empty_like(h).fill_(0.5) * h),
    "arange": Entry(lambda h, g, k: h + torch.arange(6) + torch.linspace(0, 1, 6)),
}

MATRICES: Table = {
    "matmul": Entry(lambda h, g, k: h @ g.transpose(-1, -2)),
    "matmul left": Entry(lambda h, g, k: h.transpose(-1, -2) @ g),
    "matmul parameter": Entry(lambda h, g, k: h @ k.param("w", 6, 7)),
    "matmul vector": Entry(lambda h, g, k: h @ k.param("w", 6)),
    "parameter matmul": Entry(lambda h, g, k: k.param("w", 3, 5) @ h),
    "mm": Entry(lambda h, g, k: h.mm(g.t()), "rows"),
    "mm t": Entry(lambda h, g, k: h.t().mm(g), "rows"),
    "mv": Entry(lambda h, g, k: h.mv(k.param("w", 8)), "rows"),
    "dot": Entry(lambda h, g, k: h.dot(g), "vector"),
    "vdot": Entry(lambda h, g, k: torch.vdot(h, g), "vector"),
    "inner": Entry(lambda h, g, k: torch.inner(h, g), "rows"),
    "outer": Entry(lambda h, g, k: torch.outer(h, g), "vector"),
    "ger chain": Entry(lambda h, g, k: torch.outer(h, g) @ h, "vector"),
    "bmm": Entry(lambda h, g, k: h.bmm(g), "square"),
    "baddbmm": Entry(lambda h, g, k: torch.baddbmm(h, h, g, alpha=0.3), "square"),
    "addbmm": Entry(lambda h, g, k: torch.addbmm(h[0], h, g), "square"),
    "addmm": Entry(lambda h, g, k: torch.addmm(k.param("w", 6), h, g.t(), beta=0.5), "rows"),
    "addmv": Entry(lambda h, g, k: torch.addmv(g[:, 0], h, k.param("w", 8)), "rows"),
    "addr": Entry(lambda h, g, k: torch.addr(k.param("w", 12, 12), h, g), "vector"),
    "chain_matmul": Entry(lambda h, g, k: torch.linalg.multi_dot([h, g.t(), h]), "rows"),
    "linear": Entry(lambda h, g, k: F.linear(h, k.param("w", 7, 6), k.param("b", 7))),
    "linear no bias": Entry(lambda h, g, k: F.linear(h, k.param("w", 7, 6))),
    "linear twice": Entry(
        lambda h, g, k: F.linear(F.linear(h, k.param("w", 6, 6)), k.param("w", 6, 6))
    ),
    "bilinear": Entry(lambda h, g, k: F.bilinear(h, g, k.param("w", 3, 6, 6))),
    "einsum bij,bjk": Entry(lambda h, g, k: torch.einsum("bij,bjk->bik", h, g), "square"),
    "einsum abcd,abed": Entry(lambda h, g, k: torch.einsum("abcd,abed->abce", h, g)),
    "einsum sum": Entry(lambda h, g, k: torch.einsum("abcd->ac", h)),
    "einsum outer": Entry(lambda h, g, k: torch.einsum("abcd,abce->acde", h, g)),
    "einsum diagonal": Entry(lambda h, g, k: torch.einsum("bii->bi", h) * 2, "square"),
    "einsum parameter": Entry(
        lambda h, g, k: torch.einsum("abcd,cde->abe", h, k.param("w", 5, 6, 3))
    ),
    "tensordot": Entry(lambda h, g, k: torch.tensordot(h, g, dims=([1, 3], [1, 3]))),
    "kron": Entry(lambda h, g, k: torch.kron(h, g), "rows"),
    "cdist": Entry(lambda h, g, k: torch.cdist(h, g)),
    "cdist 1": Entry(lambda h, g, k: torch.cdist(h, g, p=1.0)),
    "cdist no mm": Entry(
        lambda h, g, k: torch.cdist(h, g, compute_mode="donot_use_mm_for_euclid_dist")
    ),
    "pdist": Entry(lambda h, g, k: F.pdist(h), "rows"),
    "pairwise_distance": Entry(lambda h, g, k: F.pairwise_distance(h, g)),
    "pairwise_distance 1": Entry(lambda h, g, k: F.pairwise_distance(h, g, p=1)),
    "cosine_similarity": Entry(lambda h, g, k: F.cosine_similarity(h, g, dim=1)),
    "cosine_similarity -1": Entry(lambda h, g, k: F.cosine_similarity(h, g, dim=-1)),
    "cross": Entry(lambda h, g, k: torch.linalg.cross(h[..., :3], g[..., :3])),
    "inv_ex": Entry(lambda h, g, k: torch.linalg.inv_ex(h + 5 * torch.eye(4))[0], "square"),
    "solve_ex": Entry(lambda h, g, k: torch.linalg.solve_ex(h + 5 * torch.eye(4), g)[0], "square"),
    "solve_triangular": Entry(
        lambda h, g, k: torch.linalg.solve_triangular(h.triu() + 3 * torch.eye(4), g, upper=True),
        "square",
    ),
    "cholesky_ex": Entry(
        lambda h, g, k: torch.linalg.cholesky_ex(h @ h.mT + 2 * torch.eye(4))[0], "square"
    ),
    "cholesky_solve": Entry(
        lambda h, g, k: torch.cholesky_solve(g, h.tril() + 4 * torch.eye(4)), "square"
    ),
    "qr": Entry(lambda h, g, k: tuple(torch.linalg.qr(h + 3 * torch.eye(4))), "square"),
    "svd": Entry(lambda h, g, k: torch.linalg.svd(h + torch.diag(torch.arange(4.0)))[1], "square"),
    "svdvals": Entry(lambda h, g, k: torch.linalg.svdvals(h), "square"),
    "svdvals constant": Entry(
        lambda h, g, k: (h, torch.linalg.svdvals(k.ints("m", 9, 2, 4, 4).float())), "square"
    ),
    "eigh": Entry(
        lambda h, g, k: torch.linalg.eigh(h + h.mT + torch.diag(torch.arange(4.0) * 9))[0], "square"
    ),
    "eigvalsh": Entry(lambda h, g, k: torch.linalg.eigvalsh(h + h.mT), "square"),
    "eigvalsh constant": Entry(
        lambda h, g, k: (h, torch.linalg.eigvalsh(k.ints("m", 9, 2, 4, 4).float())), "square"
    ),
    "eigvalsh detached": Entry(lambda h, g, k: (h, torch.linalg.eigvalsh(h.detach())), "square"),
    "svdvals detached": Entry(lambda h, g, k: (h, torch.linalg.svdvals(h.detach())), "square"),
    "matrix_norm nuc detached": Entry(
        lambda h, g, k: (h, torch.linalg.matrix_norm(h.detach(), "nuc")), "square"
    ),
    "cond detached": Entry(lambda h, g, k: (h, torch.linalg.cond(h.detach())), "square"),
    "matrix_rank detached": Entry(lambda h, g, k: (h, torch.linalg.matrix_rank(h)), "square"),
    "norm nuc detached": Entry(
        lambda h, g, k: (h, h[0].detach().norm("nuc"), torch.linalg.norm(h[0].detach(), 2)),
        "square",
    ),
    "det": Entry(lambda h, g, k: torch.linalg.det(h + 3 * torch.eye(4)), "square"),
    "slogdet": Entry(lambda h, g, k: torch.linalg.slogdet(h + 5 * torch.eye(4))[1], "square"),
    "logdet": Entry(lambda h, g, k: torch.logdet(h @ h.mT + 2 * torch.eye(4)), "square"),
    "matrix_exp": Entry(lambda h, g, k: torch.linalg.matrix_exp(h), "square", "small"),
    "matrix_power": Entry(lambda h, g, k: torch.linalg.matrix_power(h, 3), "square"),
    "matrix_power 5": Entry(lambda h, g, k: torch.linalg.matrix_power(h, 5), "square"),
    "pinv": Entry(lambda h, g, k: torch.linalg.pinv(h + 5 * torch.eye(4)), "square"),
    "lu_factor_ex": Entry(
        lambda h, g, k: torch.linalg.lu_factor_ex(h + 5 * torch.eye(4))[0], "square"
    ),
    "householder_product": Entry(
        lambda h, g, k: torch.linalg.householder_product(h, g[..., 0]), "square", "small"
    ),
    "fft": Entry(lambda h, g, k: torch.fft.fft(h)),
    "rfft": Entry(lambda h, g, k: torch.fft.rfft(h)),
    "irfft": Entry(lambda h, g, k: torch.fft.irfft(torch.fft.rfft(h) * 2)),
    "fft2": Entry(lambda h, g, k: torch.fft.fft2(h).abs()),
    "rfftn": Entry(lambda h, g, k: torch.fft.rfftn(h, dim=(1, 2))),
    "fftshift": Entry(lambda h, g, k: torch.fft.fftshift(h, dim=(2, 3)).sin()),
    "stft": Entry(
        lambda h, g, k: torch.stft(h[:, 0], 4, 2, window=torch.ones(4), return_complex=True),
        "sequence",
    ),
}

TABLE: Table = {**REDUCTIONS, **INDEXING, **MATRICES}
