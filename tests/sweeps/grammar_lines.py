"""The statements that random modules are made of."""

from __future__ import annotations

from tests.sweeps.grammar_structures import STRUCTURES
from tests.sweeps.statements import Line, dims, ids, of_one, of_two, several, with_setup

_TWO, _THREE, _FOUR = dims(2), dims(3), dims(4)
_WIDE = dims(2, 3, 4)
_LINEAR = dims(2, 3)

TRAINED = [
    *[with_setup("nn.Linear({a_last}, 8)", on=_LINEAR)] * 5,
    *[with_setup("nn.Linear({a_last}, {a_last}, bias=False)", on=_LINEAR)] * 3,
    with_setup("nn.Linear({a_last}, {a_last})", "{m}({m}({a}).tanh())", on=_LINEAR),
    with_setup("nn.Parameter(torch.randn({a_last}))", "{a} * {m}"),
    with_setup("nn.Parameter(torch.randn({a_last}))", "{a} + {m}"),
    with_setup("nn.Parameter(torch.randn({a_last}, 7) * .3)", "{a} @ {m}", on=_LINEAR),
    with_setup(
        "nn.Parameter(torch.randn({a_last}, 7) * .3)", "torch.einsum('...i,ij->...j', {a}, {m})"
    ),
    *[with_setup("nn.BatchNorm1d({a1})", on=_LINEAR)] * 2,
    with_setup("nn.BatchNorm1d({a_last})", "{m}({a}.transpose(1, 2)).transpose(1, 2)", on=_THREE),
    with_setup("nn.BatchNorm1d({a1}, affine=False)", on=_LINEAR),
    with_setup("nn.BatchNorm2d({a1})", on=_FOUR),
    with_setup("nn.BatchNorm2d({a1}, track_running_stats=False)", on=_FOUR),
    with_setup("nn.LayerNorm({a_last})"),
    with_setup("nn.RMSNorm({a_last})"),
    with_setup("nn.GroupNorm(1, {a1})", on=_WIDE),
    with_setup("nn.InstanceNorm1d({a1}, affine=True)", on=_THREE),
    with_setup("nn.InstanceNorm2d({a1}, track_running_stats=True)", on=_FOUR),
    *[with_setup("nn.Conv2d({a1}, 4, 3, padding=1)", on=_FOUR)] * 3,
    with_setup("nn.Conv2d({a1}, {a1}, 3, padding=1, groups={a1}, bias=False)", on=_FOUR),
    with_setup(
        "nn.Conv2d({a1}, 6, 1, stride=2)",
        "{m}({a}.contiguous(memory_format=torch.channels_last))",
        on=_FOUR,
    ),
    with_setup("nn.ConvTranspose2d({a1}, 3, 2, stride=2)", on=_FOUR),
    with_setup("nn.Conv1d({a1}, 4, 3, padding=1)", on=_THREE),
    with_setup("nn.PReLU()"),
    with_setup("nn.Bilinear({a_last}, {a_last}, 5)", "{m}({a}, {a})", on=_LINEAR),
    with_setup(
        "nn.MultiheadAttention({a_last}, 1, batch_first=True)",
        "{m}({a}, {a}, {a}, need_weights=False)[0]",
        on=_THREE,
    ),
    with_setup("nn.utils.parametrizations.weight_norm(nn.Linear({a_last}, 6))", on=_LINEAR),
    with_setup("nn.utils.parametrizations.spectral_norm(nn.Linear({a_last}, 6))", on=_LINEAR),
    with_setup(
        "nn.Linear({a_last}, 6);"
        "nn.utils.parametrize.register_parametrization({m}, 'weight', Doubled())",
        on=_LINEAR,
    ),
    with_setup("nn.Linear({a_last}, {a_last}); {m}.weight.requires_grad_(False)", on=_LINEAR),
    with_setup(
        "nn.Sequential(nn.Linear({a_last}, 6), nn.GELU(), nn.Linear(6, {a_last}))",
        "checkpoint({m}, {a}, use_reentrant=False)",
        on=_LINEAR,
    ),
    with_setup(
        "nn.Embedding(5, 8)",
        "{m}({a})",
        on=ids,
    ),
    with_setup(
        "nn.Embedding(5, 6, padding_idx=0)",
        "{m}({a})",
        on=ids,
    ),
    with_setup(
        "nn.Embedding(5, 8, max_norm=0.7)",
        "{m}({a})",
        on=ids,
    ),
    with_setup(
        "nn.EmbeddingBag(5, 8)",
        "{m}({a})",
        on=ids,
    ),
    several(
        "{m}.mul_(.9).add_({a}.detach().reshape(-1, {a_last}).mean(0), alpha=.1)",
        "{t} = {a} - {m}",
        setup=("self.register_buffer('{n}', torch.zeros({a_last}))",),
    ),
    several("{m} += 1", "{t} = {a} * 1.1", setup=("self.register_buffer('{n}', torch.zeros(()))",)),
]

RANDOM = [
    *of_one(
        """
        F.dropout({a}, {p})
        F.dropout({a}.transpose(0, -1), {p})
        F.dropout({a}[..., ::2], {p})
        F.alpha_dropout({a}, {p}, training=True)
        {a} + torch.randn_like({a}) * .1
        {a} * torch.rand_like({a}.transpose(0, -1)).transpose(0, -1)
        F.rrelu({a}, training=True)
        {a} * torch.empty_like({a}).bernoulli_({p})
        F.gumbel_softmax({a}, dim=-1)
        {a}[torch.randperm({a0})]
        """
    ),
    *of_one(
        """
        F.dropout({a} * 1, {p}, inplace=True)
        """
    ),
    *of_one(
        """
        F.dropout2d({a}, {p})
        """,
        on=_FOUR,
    ),
    with_setup("nn.Dropout({p})"),
    several("unread = F.dropout({a}, {p}).mean()", "{t} = {a} * 1.5"),
]

POINTWISE = [
    *of_one(
        """
        {a}.relu()
        F.gelu({a})
        {a}.tanh()
        {a}.sigmoid()
        F.silu({a})
        F.elu({a})
        F.softplus({a})
        F.hardswish({a})
        F.leaky_relu({a}, .1)
        F.mish({a})
        F.celu({a})
        F.hardshrink({a}, .1)
        F.softshrink({a}, .1)
        F.softsign({a})
        F.logsigmoid({a})
        {a}.sin()
        {a}.cos()
        ({a} * .1).exp()
        ({a}.abs() + 1).log()
        ({a}.abs() + .1).sqrt()
        {a}.abs()
        {a} * {c}
        {a} + {c}
        {a} / {c}
        {c} - {a}
        {a}.clamp(-1, 1)
        -{a}
        {a}.pow(2)
        ({a}.abs() + .5).reciprocal()
        {a}.masked_fill({a} > 1, 0.5)
        {a}.erf()
        {a}.square().add(1).rsqrt()
        torch.where({a} > 0, {a}, {a} * .2)
        {a}.trunc() + {a}
        F.relu6({a})
        {a}.sign() * {a}
        F.threshold({a}, .1, .3)
        F.hardtanh({a})
        Square.apply({a}, .3)
        {a}.double().tanh().float()
        {a}.bfloat16().float()
        {a}.softmax(-1)
        {a}.log_softmax(-1)
        {a}.softmax(0)
        F.normalize({a}, dim=-1)
        F.glu(torch.cat([{a}, {a}], -1))
        {a}.cumsum(-1)
        {a}.logcumsumexp(0)
        """
    ),
    *of_two(
        """
        {a} + {b}
        {a} * {b}
        {a} - {b}
        {a} / ({b}.abs() + 1)
        torch.maximum({a}, {b})
        torch.minimum({a}, {b})
        torch.lerp({a}, {b}, .3)
        torch.where({b} > 0, {a}, {b})
        torch.addcmul({a}, {a}, {b}, value=.5)
        torch.cat([{a}, {b}], -1)
        torch.stack([{a}, {b}], 0).mean(0)
        torch.hypot({a}, {b} + 2)
        torch.atan2({a}, {b}.abs() + 1)
        {a}.copysign({b})
        """
    ),
    *of_two(
        """
        F.scaled_dot_product_attention({a}, {b}, {a})
        torch.bmm({a}, {b}.transpose(1, 2))
        """,
        on=_THREE,
    ),
    *of_two(
        """
        {a} @ {b}.t()
        torch.addmm({a}, {a} @ {b}.t(), {b})
        torch.cdist({a}, {b}).add(1).sqrt()
        """,
        on=_TWO,
    ),
    *of_two(
        """
        F.pairwise_distance({a}, {b}).unsqueeze(-1)
        F.cosine_similarity({a}, {b}, -1).unsqueeze(-1)
        """
    ),
    *of_two(
        """
        {a} + 0.1 * F.mse_loss({a}, {b})
        {a} * F.huber_loss({a}, {b})
        {a} + F.smooth_l1_loss({a}, {b})
        """
    ),
]

IN_PLACE = [
    several("{t} = {a} * 1.1", "{t}.relu_()"),
    several("{t} = {a} + 0.2", "{t} += {a}"),
    several("{t} = {a} * 0.7", "{t}[:, :2] = 0.5"),
    several("{t} = {a} * 0.7", "{t}[..., ::2] *= 2"),
    several("{t} = {a}.clone()", "{t}.masked_fill_({t} > 0.5, -1.0)"),
    several("{t} = {a}.sin()", "{t}[0].copy_({a}[-1])"),
    several("{t} = {a}.clone()", "{t}.transpose(0, -1).add_(1)"),
    several("{t} = {a} * 1", "{t}.index_add_(0, torch.tensor([0, 1]), {a}[:2])"),
    several("{t} = torch.zeros({a0}, {a_last})", "{t}[torch.arange({a0})] = {a}", on=_TWO),
    several("{t} = {a}.clone()", "{t}[{t} < 0] = 0.1"),
    several("{t} = {a} * 1.0", "F.relu({t}, inplace=True)", "F.hardtanh({t}, inplace=True)"),
    several("{t} = {a} * 1.0", "{t} = {t}.mul_(2).add_(1)"),
]

VIEWS = [
    *of_one(
        """
        {a}.transpose(0, -1)
        {a}[..., 1:]
        {a}[::2]
        {a}[..., ::2]
        {a}.unsqueeze(1).expand(-1, 2, *{a}.shape[1:]).sum(1)
        {a}.flip(0)
        {a}.roll(1, -1)
        {a}.chunk(2, -1)[1]
        {a}.split(3, -1)[0]
        {a}.movedim(0, -1)
        {a}.reshape(-1, {a_last})
        {a}.flatten(1)
        {a}.narrow(-1, 0, 3)
        {a}.select(0, 0).unsqueeze(0)
        {a}.mean(0, keepdim=True).expand_as({a})
        {a}.tile(2)
        {a}.repeat_interleave(2, 0)
        {a}.contiguous()
        F.pad({a}, (1, 1))
        {a}.as_strided({a}.shape, {a}.stride())
        {a}.unfold(-1, 2, 1).sum(-1)
        {a}.diff(dim=-1)
        torch.tril({a} if {a}.dim() > 1 else {a}.unsqueeze(0))
        {a}[..., [0, 1, 1]]
        {a}.unbind(0)[0].unsqueeze(0) * 1
        {a}.swapaxes(0, 1)
        """
    ),
    *of_one(
        """
        {a}.permute(0, 2, 1)
        {a}.permute(1, 2, 0)
        """,
        on=_THREE,
    ),
    *of_one(
        """
        {a}.permute(0, 2, 3, 1)
        {a}.contiguous(memory_format=torch.channels_last)
        {a}.flatten(2).transpose(1, 2)
        F.pixel_unshuffle({a}[..., :2 * ({a2} // 2), :2 * ({a3} // 2)], 2)
        """,
        on=_FOUR,
    ),
]

REDUCTIONS = [
    *of_one(
        """
        {a}.mean(-1, keepdim=True) * {a}
        {a} - {a}.amax(-1, keepdim=True)
        {a}.sum(0, keepdim=True)
        {a}.var(-1, keepdim=True) + {a}
        {a}.logsumexp(-1, keepdim=True)
        {a} / ({a}.norm() + 1)
        {a}.norm(dim=-1, keepdim=True)
        {a}.std(0, keepdim=True).add(.1) * {a}
        {a}.max(-1, keepdim=True)[0] + {a}
        {a}.topk(2, -1)[0]
        {a}.sort(-1)[0]
        {a}.median(-1, keepdim=True)[0] * {a}
        ({a} * .5).prod(-1, keepdim=True) + {a}
        {a}.gather(-1, {a}.argmax(-1, keepdim=True))
        {a}.index_select(0, torch.tensor([0, 1, 0]))
        torch.zeros_like({a}).scatter_add(-1, {a}.argsort(-1), {a})
        {a}.scatter(-1, {a}.argmin(-1, keepdim=True), 0.3)
        {a}.cumprod(-1).clamp(-5, 5)
        torch.fft.rfft({a}).abs() + .1
        torch.view_as_real(torch.view_as_complex(torch.stack([{a}, {a}], -1)) * (1 + 2j)).sum(-1)
        {a}.argmax(-1, keepdim=True).float() + {a}
        ({a}.detach() + {a})
        {a}.logit(.4)
        {a}.take_along_dim({a}.argsort(-1), -1)
        torch.linalg.vector_norm({a}, 3, -1, keepdim=True)
        """
    ),
    *of_one(
        """
        F.max_pool2d({a}, 2)
        F.avg_pool2d({a}, 2)
        F.adaptive_avg_pool2d({a}, 2)
        F.interpolate({a}, scale_factor=2)
        F.interpolate({a}, size=(4, 4), mode='bilinear')
        F.unfold({a}, 2)
        F.adaptive_max_pool2d({a}, 2)
        """,
        on=_FOUR,
    ),
    *of_one(
        """
        F.max_pool1d({a}, 2)
        F.avg_pool1d({a}, 2)
        torch.baddbmm({a} @ {a}.mT, {a}, {a}.mT)
        F.interpolate({a}, scale_factor=2, mode='linear')
        """,
        on=_THREE,
    ),
    *of_one(
        """
        {a}.t()
        torch.outer({a}[:, 0], {a}[0])
        {a} @ ({a}.t() @ {a})
        F.cross_entropy({a}, {a}.argmax(-1)) * {a}
        """,
        on=_TWO,
    ),
    several("with torch.no_grad(): {t}q = {a}.mean()", "{t} = {a} - {t}q"),
    several("{t}u, {t}v = {a}.chunk(2, -1)", "{t} = {t}u.sigmoid() * {t}v.sum(-1, keepdim=True)"),
    several("{t}q = ({a}.detach() > 0).float()", "{t} = {a} * {t}q"),
]

LINES: tuple[Line, ...] = (
    *TRAINED,
    *TRAINED,
    *RANDOM,
    *POINTWISE,
    *IN_PLACE,
    *VIEWS,
    *REDUCTIONS,
    *STRUCTURES,
)
