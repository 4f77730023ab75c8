"""More statements of random modules: shared and tied weights, indices, masks, complex numbers,
other widths of numbers, custom functions, checkpoints, attention, recurrent cells."""

from __future__ import annotations

from tests.sweeps.statements import dims, floats, ids, of_one, of_two, several, with_setup

_TWO, _THREE, _FOUR = dims(2), dims(3), dims(4)
_LINEAR = dims(2, 3)

CONVOLUTIONS = [
    with_setup("nn.Conv2d({a1}, 4, 3, padding=2, dilation=2)", on=_FOUR),
    with_setup("nn.Conv2d({a1}, 4, 3, padding=1, padding_mode='circular')", on=_FOUR),
    with_setup("nn.Conv2d({a1}, 4, 3, padding=1, padding_mode='reflect')", on=_FOUR),
    with_setup("nn.Conv2d({a1}, 4, (1, 3), padding='same', bias=False)", on=_FOUR),
    with_setup("nn.Conv2d({a1}, 4, 2, stride=2); {m}.weight.requires_grad_(False)", on=_FOUR),
    with_setup("nn.Conv3d(1, 2, 3, padding=1)", "{m}({a}.unsqueeze(1)).mean(1)", on=_FOUR),
    with_setup("nn.ConvTranspose1d({a1}, 3, 2, stride=2, output_padding=1)", on=_THREE),
    with_setup("nn.Conv1d({a1}, {a1}, 3, padding=1)", "{m}({m}({a}).relu())", on=_THREE),
    with_setup("nn.Parameter(torch.randn(4, 4) * .3)",
               "F.conv1d({a}.flatten(0, 1).unsqueeze(1), ({m} @ {m}.t()).unsqueeze(1)[..., :2])",
               on=_THREE),
    with_setup("nn.utils.parametrizations.weight_norm(nn.Conv2d({a1}, 3, 2))", on=_FOUR),
]  # fmt: skip

NORMS = [
    with_setup("nn.GroupNorm({a1}, {a1}, affine=False)", on=_FOUR),
    with_setup("nn.BatchNorm2d({a1}, momentum=None)", on=_FOUR),
    with_setup("nn.BatchNorm1d({a1}); {m}.eval()", on=_LINEAR),
    with_setup("nn.BatchNorm2d({a1}); {m}.weight.requires_grad_(False)", on=_FOUR),
    with_setup("nn.BatchNorm2d({a1})", "{m}({m}({a}).relu())", on=_FOUR),
    with_setup("nn.LayerNorm([{a1}, {a_last}], elementwise_affine=False)", on=_THREE),
    with_setup("nn.LayerNorm({a_last}, bias=False)"),
    with_setup("nn.LocalResponseNorm(2)", on=_FOUR),
    with_setup("nn.InstanceNorm1d({a1})", on=_THREE),
    with_setup(
        "nn.BatchNorm1d({a_last})",
        "F.batch_norm({a}, {m}.running_mean, {m}.running_var, training=True)",
        on=_TWO,
    ),
]

ATTENTION = [
    *of_two(
        """
        F.scaled_dot_product_attention({a}, {b}, {a}, is_causal=True)
        F.scaled_dot_product_attention({a}, {b}, {b}, dropout_p={p})
        F.scaled_dot_product_attention({a}, {a}, {b}, attn_mask={b} @ {a}.mT)
        F.scaled_dot_product_attention({a}, {a}, {b}, attn_mask=({a} @ {a}.mT).detach() > -9)
        """,
        on=dims(3, 4),
    ),
    with_setup(
        "nn.MultiheadAttention({a_last}, 1, dropout={p}, batch_first=True)",
        "sum(x.sum(-1, keepdim=True) for x in {m}({a}, {a}, {a}))",
        on=_THREE,
    ),
    with_setup(
        "nn.MultiheadAttention({a_last}, 1, batch_first=True)",
        "{m}({a}, {a}, {a}, is_causal=True, need_weights=False, "
        "attn_mask=nn.Transformer.generate_square_subsequent_mask({a1}))[0]",
        on=_THREE,
    ),
    with_setup(
        "nn.TransformerEncoderLayer({a_last}, 1, 8, dropout={p}, batch_first=True)", on=_THREE
    ),
    with_setup("nn.RNNCell({a_last}, 5)", on=_TWO),
    with_setup("nn.GRUCell({a_last}, {a_last})", "{m}({a}, {m}({a}))", on=_TWO),
    with_setup("nn.LSTMCell({a_last}, 4)", "torch.cat({m}({a}), -1)", on=_TWO),
]

SHARED = [
    several(
        "{t}x = {m}({a}.abs().long().clamp(max=3)).mean(1)",
        "{t} = F.linear({t}x, {m}.weight)",
        setup=("{m} = nn.Embedding(4, 6)",),
        on=_TWO,
    ),
    several(
        "{t} = F.linear(F.linear({a}, {m}a.weight).tanh(), {m}b.weight.t())",
        setup=("{m}a = nn.Linear({a_last}, 5)", "{m}b = nn.Linear({a_last}, 5)",
               "{m}b.weight = {m}a.weight"),
        on=_LINEAR,
    ),
    several(
        "{t} = {m}c({m}a({a}).relu())",
        setup=("{m}a = nn.Linear({a_last}, {a_last})", "{m}c = nn.Sequential({m}a, nn.Tanh())"),
        on=_LINEAR,
    ),
    several(
        "{t} = {a} * {m}[:{a_last}] + {m}[1:{a_last} + 1]",
        setup=("{m} = nn.Parameter(torch.randn({a_last} + 2))",),
    ),
    several(
        "{t} = {a} @ {m}.as_strided(({a_last}, 3), (1, 2))",
        setup=("{m} = nn.Parameter(torch.randn({a_last} + 6))",),
        on=_LINEAR,
    ),
    with_setup("nn.utils.parametrizations.orthogonal(nn.Linear({a_last}, 4))", on=_LINEAR),
    with_setup("nn.ParameterList([nn.Parameter(torch.randn({a_last})) for _ in range(3)])",
               "{a} * {m}[0] + {m}[2]"),
]  # fmt: skip

INDEXED = [
    *of_one(
        """
        {a}.index_put((torch.tensor([0, 1, 0]),), {a}[[1, 0, 1]] * .5, accumulate=True)
        {a}.index_put((torch.tensor([1, 0]),), {a}[:2] * .5)
        torch.zeros_like({a}).scatter_reduce(-1, {a}.argsort(-1), {a}, 'sum')
        torch.zeros_like({a}).scatter_reduce(0, {a}.argsort(0), {a}, 'amax', include_self=False)
        {a}.index_copy(0, torch.tensor([1, 0]), {a}[:2].tanh())
        {a}.index_fill(-1, torch.tensor([0, 2]), .25)
        {a}.masked_scatter({a} > .2, {a}.flip(-1))
        {a}.take({a}.argsort(-1))
        {a}.gather(0, {a}.argsort(0, descending=True))
        {a}[..., {a}.detach().mean(tuple(range({a}.dim() - 1))).argsort()]
        {a}[{a}.argmax(0).clamp(max=1)]
        {a}[None, ..., -1]
        torch.where({a} > {a}.median(), {a}, torch.tensor(0.5))
        {a}.kthvalue(2, -1)[0]
        {a}.cummax(-1)[0] + {a}
        torch.bucketize({a}.detach(), torch.linspace(-1, 1, 5)) * {a}
        F.one_hot({a}.argmax(-1), {a_last}) * {a}
        {a}.renorm(2, 0, 1.)
        torch.searchsorted({a}.detach().sort(-1)[0], {a}.detach().contiguous()) * {a}
        """
    ),
    *of_one("F.embedding_bag({a}, torch.tensor([[0, 1], [1, 0]]), mode='max')", on=_TWO),
    several("{t}x = {m}({a})", "{t} = {t}x.scatter(1, {a}.unsqueeze(-1) % 3, .5)",
            setup=("{m} = nn.Embedding(5, 4)",), on=ids),
]  # fmt: skip

CUT = [
    several("{t}p = torch.tensor_split({a}, 3, -1)", "{t} = {t}p[0].sum(-1) * {t}p[2].mean(-1)"),
    several("{t}p = {a}.unbind(0)", "{t} = torch.stack([{t}p[-1], {t}p[0] * 2], -1)"),
    several("{t}p = {a}.split([1, {a_last} - 1], -1)", "{t} = torch.cat({t}p[::-1], -1)"),
    *of_one(
        """
        torch.cat([{a}, {a}.detach(), {a} * 2], 0)
        torch.stack([{a}, {a}], -1).flatten(-2)
        torch.cat([{a}[:1], {a}[1:].exp().clamp(max=2)])
        {a}.unflatten(-1, (1, -1)).squeeze(-2)
        {a}.as_strided((2, 3), (1, 1))
        {a}.as_strided((2, 2), ({a_last}, 1), 1) if {a}.is_contiguous() else {a}
        {a}.diagonal(0, -2, -1) if {a}.dim() > 1 else {a}
        {a}.view_as({a})
        {a}.mT if {a}.dim() > 1 else {a}
        {a}.expand(2, *{a}.shape)
        {a}.unsqueeze(-1).expand(*{a}.shape, 3).reshape(*{a}.shape[:-1], -1)
        {a}.rot90(1, (0, -1)) if {a}.dim() > 1 else {a}
        torch.block_diag({a}[..., 0].flatten()[:3], {a}.flatten()[:2])
        torch.tensordot({a}, {a}, {a}.dim()).reshape(1, 1) * torch.ones(2, 2)
        torch.einsum('...i,...j->...ij', {a}, {a}).flatten(-2)
        torch.einsum('i...,i...->...', {a}, {a}.sin())
        torch.einsum('...ii->...i', {a}.unsqueeze(-1) * {a}.unsqueeze(-2))
        torch.kron({a}, torch.ones(1, 2))
        {a}.trace() * {a} if {a}.dim() == 2 else {a}
        """
    ),
    *of_one(
        """
        torch.einsum('bij,bkj->bik', {a}, {a})
        torch.einsum('bij->ji', {a})
        torch.block_diag(*{a}.unbind(0))
        """,
        on=_THREE,
    ),
    *of_one("torch.einsum('bchw,bdhw->bcd', {a}, {a})", on=_FOUR),
    *of_one("F.pixel_shuffle(torch.cat([{a}] * 4, 1), 2)", on=_FOUR),
    *of_one("F.fold(F.unfold({a}, 2), {a}.shape[2:], 2)", on=_FOUR),
    *of_one("F.grid_sample({a}, torch.tanh({a}[:, :2].permute(0, 2, 3, 1)), align_corners=True)",
            on=_FOUR),
]  # fmt: skip

MUTATED = [
    several("{t} = {a} * 1", "{t}.chunk(2, -1)[0].mul_(3)", "{t}[..., -1] = {a}[..., 0]"),
    several("{t} = {a} * 1", "{t}.index_put_((torch.tensor([0, 1]),), {a}[:2].sin())"),
    several("{t} = {a}.clone()", "{t}.masked_scatter_({t} > 0, {a}.flip(0))"),
    several("{t} = torch.empty_like({a})", "{t}.copy_({a})", "{t}.clamp_(-1, 1).add_({a})"),
    several("{t} = {a}.tanh()", "{t}.unsqueeze(0).squeeze(0).transpose(0, -1)[0].zero_()"),
    several("{t} = {a} + 1", "{t}v = {t}[..., 1:]", "{t}v.mul_(2)", "{t} = {t} + {t}v.sum()"),
    several("{t} = {a}.double()", "{t}.scatter_add_(-1, {t}.argsort(-1), {a}.double() * .1)",
            "{t} = {t}.float()"),
    several("{t} = {a} * 1", "{t}.as_strided((2, 2), ({a_last}, 1)).add_(1)"),
    several("{t} = torch.zeros_like({a})", "for i in range({a0}): {t}[i] = {a}[i] * (i + 1)"),
    several("{t} = {a} * 1", "{t}.sigmoid_()"),
    several("{t} = {a}.exp().clamp(max=3)", "{t}.addcmul_({a}, {a}, value=.1)",
            "{t}.lerp_({a}, .3)"),
    several("{m}[:2] = {a}.detach().flatten()[:2]", "{t} = {a} + {m}[0]",
            setup=("self.register_buffer('{n}', torch.zeros(3))",)),
    several("{m} = {m} * .9 + {a}.detach().mean()", "{t} = {a} * ({m} + 1)",
            setup=("self.register_buffer('{n}', torch.zeros(()))",)),
    several("{t} = F.dropout(F.relu({a} * 1, inplace=True), {p}, inplace=True)"),
]  # fmt: skip

NUMBERS = [
    *of_one(
        """
        torch.fft.irfft(torch.fft.rfft({a}) * (1 - .5j), n={a_last})
        torch.fft.fft({a}).imag + {a}
        (torch.complex({a}, {a}.sin()) * torch.complex({a}, {a})).angle()
        torch.polar({a}.abs() + .1, {a}).real
        torch.complex({a}, {a} * 2).conj().mul(1j).imag
        torch.complex({a}, {a} + 1).abs()
        torch.view_as_real(torch.complex({a}, {a}).exp()).clamp(-3, 3).flatten(-2)
        {a}.half().float() * {a}
        ({a}.bfloat16() @ {a}.bfloat16().mT).float() if {a}.dim() > 1 else {a}
        {a}.double().softmax(-1).float()
        {a}.to(torch.float64).cumsum(0).to({a})
        ({a} > 0).int().cumsum(-1) * {a}
        ({a} * 4).round().to(torch.int16).bitwise_and(3) + {a}
        {a}.detach().view(torch.int32).bitwise_xor(5).sign() * {a}
        {a}.isnan().logical_not() * {a}
        torch.arange({a_last}).remainder(3) * {a}
        torch.linspace(0, 1, {a_last}) + {a}
        F.log_softmax({a}.bfloat16(), -1).float()
        F.layer_norm({a}.bfloat16(), ({a_last},)).float()
        """
    ),
    with_setup("nn.Parameter(torch.randn({a_last}, dtype=torch.complex64))", "({a} * {m}).real"),
    with_setup("nn.Parameter(torch.randn({a_last}, 3, dtype=torch.complex64))",
               "({a}.to(torch.complex64) @ {m}).abs()", on=_LINEAR),
    with_setup("nn.Linear({a_last}, 5, dtype=torch.float64)", "{m}({a}.double()).float()",
               on=_LINEAR),
    with_setup("nn.Linear({a_last}, 5, dtype=torch.bfloat16)", "{m}({a}.bfloat16()).float()",
               on=_LINEAR),
    with_setup("nn.BatchNorm2d({a1}, dtype=torch.bfloat16)", "{m}({a}.bfloat16()).float()",
               on=_FOUR),
    several("{t} = {a} * {m}.float().mean()",
            setup=("self.register_buffer('{n}', torch.arange(4))",)),
    several("{m} += 1", "{t} = {a} / {m}",
            setup=("self.register_buffer('{n}', torch.ones((), dtype=torch.int64))",)),
    several("{m}.logical_xor_({a}.detach().flatten()[:3] > 0)", "{t} = {a} + {m}.sum()",
            setup=("self.register_buffer('{n}', torch.zeros(3, dtype=torch.bool))",)),
]  # fmt: skip

FUNCTIONS = [
    *of_one(
        """
        Cube.apply({a})
        Straight.apply({a})
        Doubling.apply({a} * 1)
        torch.cat(Halves.apply({a}), -1)
        Halves.apply({a})[1] + 1
        checkpoint(lambda v: F.dropout(v.tanh(), {p}) * v, {a}, use_reentrant=False)
        checkpoint(torch.sin, checkpoint(torch.exp, {a}.clamp(max=1), use_reentrant=False), use_reentrant=False)
        """  # noqa: E501
    ),
    with_setup("nn.Sequential(nn.Linear({a_last}, 6), nn.Dropout({p}), nn.LayerNorm(6))",
               "checkpoint({m}, {a}, use_reentrant=False)", on=_LINEAR),
    with_setup("nn.Sequential(nn.Conv2d({a1}, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(inplace=True))",
               "checkpoint({m}, {a}, use_reentrant=False)", on=_FOUR),
    with_setup("nn.Sequential(nn.Linear({a_last}, 4), nn.Tanh())",
               "checkpoint(lambda v: {m}(v) + {m}(v * 2), {a}, use_reentrant=False)", on=_LINEAR),
]  # fmt: skip

DRAWN = [
    *of_one(
        """
        F.dropout({a}, 0.)
        F.dropout({a}, 1.)
        F.dropout1d({a}, {p})
        F.feature_alpha_dropout({a}, {p}, training=True)
        {a} + torch.normal({a}.detach(), .1)
        {a} * torch.bernoulli({a}.detach().sigmoid())
        {a}[torch.randint(0, {a0}, (3,))]
        {a} + torch.rand({a_last})
        {a}.gather(-1, {a}.detach().softmax(-1).flatten(0, -2).multinomial(1).view(*{a}.shape[:-1], 1))
        F.gumbel_softmax({a}, hard=True) * {a}
        """,  # noqa: E501
        on=floats,
    ),
    several("{t}r = torch.randn({a0})", "{t}s = torch.rand({a0})",
            "{t} = {a} + {t}s.view(-1, *[1] * ({a}.dim() - 1))"),
]  # fmt: skip

STRUCTURES = (
    *CONVOLUTIONS,
    *NORMS,
    *ATTENTION,
    *SHARED,
    *INDEXED,
    *CUT,
    *MUTATED,
    *NUMBERS,
    *FUNCTIONS,
    *DRAWN,
)
