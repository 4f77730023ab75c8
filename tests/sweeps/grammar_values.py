"""Statements that look at values: of activations, inputs, parameters and NumPy's numbers.

What they decide is another thing in other steps: a branch, a count, a selection, an attribute.
"""

from __future__ import annotations

from tests.sweeps.grammar_lines import LINES
from tests.sweeps.statements import Line, dims, floats, ids, several

_ROWS = dims(2, 3)
_COUNTED = ("{m} = 0",)
_ATTRIBUTE = ("{m} = np.sqrt({k})",)


def _of_ids(*body: str, setup: tuple[str, ...] = ()) -> Line:
    return Line(body, setup, {"a": floats, "i": ids})


ACTIVATIONS = [
    several("if {a}.detach().abs().mean() > {c}:", "    {t} = {a} * 2", "else:",
            "    {t} = {a} - 1"),
    several("{t} = {a}.sin() if {a}.detach().sum().item() > 0 else {a}.cos()"),
    several("{t} = {a}", "while {t}.detach().abs().max() > 3 * {c}:", "    {t} = {t} / 2"),
    several("{t} = {a}", "for {n} in range({k}):",
            "    if {t}.detach().mean() > {c} / 9:", "        break", "    {t} = {t} * {c}"),
    several("if {a}.detach().min() < -{c} and {a}.detach().max() > {c}:", "    {t} = {a}.tanh()",
            "elif bool(({a} > 0).any()):", "    {t} = {a}.sigmoid()", "else:", "    {t} = -{a}"),
    several("{n} = {a}.detach().mean().item()", "{t} = {a} * ({c} if 0 < {n} < 2 else -{c})"),
    several("assert torch.isfinite({a}).all(), 'not finite'", "{t} = {a} + {c}"),
    several("if not torch.isfinite({a}).all():", "    {a} = torch.nan_to_num({a})",
            "{t} = {a} * {c}"),
    several("if {a}.detach().argmax() % 2 == 0:", "    {m} = {m} + 1", "{t} = {a} * {c}",
            setup=_COUNTED),
    several("if {m}.weight.norm() > {c}:", "    {t} = {m}({a})", "else:", "    {t} = {m}({a}) * 2",
            setup=("{m} = nn.Linear({a_last}, 5)",), on=_ROWS),
    several("{m} += {a}.detach().mean()", "{t} = {a} * 2 if {m} > 0 else {a}",
            setup=("self.register_buffer('{n}', torch.zeros(()))",)),
    several("{n} = F.dropout({a}, {p})", "{t} = {n} * {c} if {n}.detach().sum() > 0 else {n}"),
    several("{n} = max({a}.detach().abs().max().item(), {c})", "{t} = {a} / {n}"),
    several("{t} = {a} * float({a}.detach().abs().mean() > {c})"),
    several("{m} = {a}.detach().abs().mean().item()", "{t} = {a} / (1 + {m})", setup=_COUNTED),
    several("{m} = [{a}.detach().max().item(), int({a}.detach().argmax())]", "{t} = {a} * {c}",
            setup=_COUNTED),
    several("{t} = {a} * round(math.exp(-{a}.detach().abs().mean().item()), 2)"),
    several("{n} = math.log({a}.detach().abs().sum().item() + {c})",
            "{t} = {a} * {n} if {n} > {c} else {a}"),
    several("{t} = {a} * 2 if torch.allclose({a}, {a}.detach().tanh(), atol={c}) else {a}"),
    several("{t} = checkpoint(lambda v: v.sin() if v.detach().mean() > 0 else"
            " v / (1 + v.detach().abs().max().item()), {a}, use_reentrant={k} % 2 > 0)"),
    several("{n} = {a}.detach().flatten(1).argmax(1)",
            "{t} = {a} * {n}.unique().numel() + {n}.bincount(minlength=9)[0]", on=_ROWS),
    several("if {m} is None or {m}.shape != {a}.shape[-1:]:",
            "    {m}, {m}_size = torch.linspace(0, 1, {a}.shape[-1]), {a}.shape[-1]",
            "{t} = {a} * {m} + {m}_size", setup=("{m}, {m}_size = None, 0",)),
    several("if {m} == 0:", "    {m}.fill_(1)", "    {t} = {a} * 2", "else:", "    {t} = {a} + {m}",
            setup=("self.register_buffer('{n}', torch.zeros(()))",)),
]  # fmt: skip

INPUTS = [
    _of_ids("{t} = {a} * int({i}.max())"),
    _of_ids("{t} = {a}.sin() if ({i} == 2).any() else {a}.cos()"),
    _of_ids("{n} = {i}[0].tolist()", "{t} = {a} * {n}[0] + sum({n})"),
    _of_ids("{t} = {a}", "for {n} in range(int({i}[0, 0])):", "    {t} = {t} + {n}"),
    _of_ids("{t} = {a}[{i}[:, 0] > 1].sum(0) + {a}"),
    _of_ids("{t} = {a}.sin() if torch.equal({i}[:, 0], {i}[:, 1]) else {a} + 1"),
    _of_ids("{t} = {a}[torch.nonzero({i}[:, 0] > 1)[:, 0]].sum(0, keepdim=True) + {a}"),
    _of_ids("{t} = {a}[:max(1, int({i}[:, 1].max()))]"),
    _of_ids("{n} = len(set({i}.flatten().tolist()))", "{t} = {a} / {n}"),
    _of_ids("{m} = int({i}.sum())", "{t} = {a} + {m} / 100", setup=_COUNTED),
    _of_ids("{t} = {a} * {i}.unique().numel()"),
    _of_ids("{n} = torch.unique({i}, return_inverse=True)[1]", "{t} = {a} + {n}.sum() / 9"),
    _of_ids("{n} = {i}[:, 0].bincount(minlength=5).tolist()", "{t} = {a} * {n}[1] - {n}[2]"),
    _of_ids("match int({i}[0, 0]) % 3:", "    case 0:", "        {t} = {a} + 1", "    case 1:",
            "        {t} = {a} * 2", "    case _:", "        {t} = -{a}"),
    _of_ids("{t} = torch.repeat_interleave({a}, {i}[:{a0}, 0] % 2 + 1, dim=0)"),
    _of_ids("{n} = f'{{int({i}[0, 1])}}'", "{t} = {a} * len({n}) + int({n})"),
]  # fmt: skip

NUMBERS = [
    several("{t} = {a} * np.sqrt({k})"),
    several("{t} = {a} + np.float32({c})"),
    several("{t} = {a} / np.log(1 + np.arange(1, 4)).sum()"),
    several("{t} = {a} * np.int64({k})"),
    several("{t} = {a} - math.sqrt({c}) * np.pi"),
    several("{t} = {a} * {m}", setup=_ATTRIBUTE),
    several("{t} = {a} * np.prod({a}.shape[1:])"),
    several("{t} = {a} * np.mean([{c}, {k}])"),
]  # fmt: skip

VALUE_LINES: tuple[Line, ...] = (*LINES, *(ACTIVATIONS + INPUTS + NUMBERS) * 6)
