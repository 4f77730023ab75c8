"""Random PyTorch modules from a grammar: real source code, equal for equal seeds.

A module is written line by line. Each line is tried on real tensors first, and kept where torch
runs it and every number stays finite; a module is kept where eager trains it.
"""

from __future__ import annotations

import linecache
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tests.sweeps.grammar_lines import LINES
from tests.sweeps.statements import PRELUDE, Line

_LARGEST = 1e4


@dataclass(frozen=True)
class RandomModule:
    """A module that eager trains.

    Attributes:
        seed: what it was made from.
        source: the code of `class Model` and of what it needs.
        build: makes the module, with parameters drawn from the seed.
        inputs: makes its arguments, the same each time.
        unused: positions of differentiable outputs that its loss does not read.
        autocast: whether it is called under autocast to bfloat16.
    """

    seed: int
    source: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    unused: frozenset[int] = frozenset()
    autocast: bool = False

    def loss(self, output: Any, *_: Any) -> Tensor:
        """One number of the outputs that it reads."""
        return loss_of(output, self.unused)

    def context(self) -> AbstractContextManager[object]:
        """What its forward runs in."""
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()


def random_module(
    seed: int,
    lines: tuple[int, int] = (4, 16),
    statements: Sequence[Line] = LINES,
    ids_share: float = 0.25,
) -> RandomModule:
    """The module of a seed: between `lines` of the statements; `ids_share` of them are given
    indices, too."""
    for attempt in range(200):
        number = seed * 1000 + attempt
        writer = _Writer(random.Random(number), number, statements, ids_share)
        found = writer.module(seed, lines)
        if found is not None and _trains(found):
            return found
    raise RuntimeError(f"no module of seed {seed} trains")


def _trains(made: RandomModule) -> bool:
    """Whether eager's step works, twice with the same bits, and gives some parameter a gradient."""
    try:
        first, again = _step(made), _step(made)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    if not first:
        return False
    same = all(a.dtype == b.dtype and a.equal(b) for a, b in zip(first, again, strict=True))
    return same and all(bool(torch.isfinite(v).all()) for v in first)


def _step(made: RandomModule) -> list[Tensor]:
    model, inputs = made.build(), made.inputs()
    torch.manual_seed(made.seed)
    with made.context():
        loss = made.loss(model(*inputs))
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def loss_of(output: Any, unused: frozenset[int] = frozenset()) -> Tensor:
    """One number that weighs every element of every differentiable output differently, except
    of those at the positions `unused`."""
    total = torch.zeros(())
    for position, value in enumerate(torch.utils._pytree.tree_leaves(output)):
        if isinstance(value, Tensor) and value.requires_grad and position not in unused:
            real = torch.view_as_real(value) if value.is_complex() else value
            weights = torch.linspace(0.5, 1.5, real.numel()).reshape(real.shape)
            total = total + (position + 1) * (real.float() * weights).sum()
    return total


class _Writer:
    """Writes one module: what `__init__` and `forward` say, and the values at hand."""

    def __init__(
        self, dice: random.Random, seed: int, statements: Sequence[Line], ids_share: float
    ) -> None:
        self.dice = dice
        self.seed = seed
        self.statements = statements
        self.ids_share = ids_share
        self.setup: list[str] = []
        self.body: list[str] = []
        self.values: dict[str, Any] = {}
        self.space: dict[str, Any] = {}
        exec(PRELUDE, self.space)
        self.probe = nn.Module()
        self.space["self"] = self.probe
        self.count = 0

    def module(self, seed: int, lines: tuple[int, int]) -> RandomModule | None:
        torch.manual_seed(self.seed)
        shapes, first = self._arguments()
        self._take(first)
        wanted = self.dice.randint(*lines)
        for _ in range(wanted * 8):
            if len(self.body) >= wanted:
                break
            self._line(self.dice.choice(self.statements))
        returned = self._returned()
        if returned is None:
            return None
        text, unused = returned
        made = _made(seed, self._source(shapes, text), first, self.seed)
        return replace(made, unused=unused, autocast=self.dice.random() < 0.1)

    def _arguments(self) -> tuple[list[str], dict[str, Tensor]]:
        batch, width = self.dice.choice((4, 6, 8)), self.dice.choice((6, 8, 12))
        kinds = [
            (batch, width),
            (batch, self.dice.choice((3, 5)), width),
            (batch, 4, self.dice.choice((5, 6)), 6),
        ]
        count = self.dice.choice((1, 1, 2))
        chosen = [self.dice.choice(kinds) for _ in range(count)]
        values: dict[str, Tensor] = {}
        for i, shape in enumerate(chosen):
            value = torch.randn(shape)
            if self.dice.random() < 0.2:
                value = value.transpose(-1, -2).contiguous().transpose(-1, -2)
            if self.dice.random() < 0.15:
                value.requires_grad_()
            values[f"x{i}"] = value
        if self.dice.random() < self.ids_share:
            values["ids"] = torch.randint(0, 5, (batch, 3))
        return list(values), values

    def _take(self, first: dict[str, Tensor]) -> None:
        for name, value in first.items():
            self.values[name] = value
            self.space[name] = value.clone()

    def _line(self, line: Line) -> None:
        operands = self._operands(line)
        if operands is None:
            return
        name = f"t{self.count}"
        made = f"m{self.count}"
        names = dict(operands)
        fill = {
            "m": f"self.{made}",
            "n": made,
            "k": str(self.dice.choice((1, 2, 3))),
            "p": str(self.dice.choice((0.1, 0.15, 0.3, 0.45, 0.5))),
            "c": f"{self.dice.uniform(0.3, 1.7):.3f}",
        }
        shape = {f"{n}{i}": str(s) for n, v in names.items() for i, s in enumerate(_shape(v, self))}
        last = {f"{n}_last": str(_shape(v, self)[-1]) for n, v in names.items()}
        words = {**names, **fill, **shape, **last}
        setup = [s.format_map(words) for s in line.setup]
        body = [b.format_map({**words, "t": name}) for b in line.body]
        if not self._works(setup, body, name):
            return
        self.count += 1
        self.setup += setup
        self.body += body
        self.values[name] = self.space[name]

    def _operands(self, line: Line) -> dict[str, str] | None:
        found: dict[str, str] = {}
        for role, suits in line.operands.items():
            fitting = [
                n
                for n in self.values
                if suits(self.space[n], *(self.space[f] for f in found.values()))
            ]
            if not fitting:
                return None
            # What was made last is likelier, so that modules are deep.
            recent = fitting[-3:] if self.dice.random() < 0.7 else fitting
            found[role] = self.dice.choice(recent)
        return found

    def _works(self, setup: list[str], body: list[str], name: str) -> bool:
        """Try the lines on the real values; what they break is undone by running all anew."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for text in (*setup, "\n".join(body)):
                    exec(text, self.space)
        except (RuntimeError, ValueError, IndexError, TypeError, KeyError, AssertionError):
            return False
        value = self.space[name]
        if not isinstance(value, Tensor) or value.numel() > 20000 or value.numel() == 0:
            return False
        if not (value.is_floating_point() or value.is_complex()):
            return True
        size = value.detach().abs()
        return bool(torch.isfinite(size).all()) and float(size.max()) < _LARGEST

    def _returned(self) -> tuple[str, frozenset[int]] | None:
        """What is returned, and the positions in it that the loss does not read."""
        trained = [
            n
            for n in self.values
            if n.startswith("t")
            and self.space[n].requires_grad
            and (self.space[n].is_floating_point() or self.space[n].is_complex())
        ]
        if not trained or not self.setup:
            return None
        last, other = trained[-1], self.dice.choice(trained)
        aside = self.dice.choice(list(self.values))
        views = (f"{last}[:2]", f"{last}.transpose(0, -1)", f"{last}.flatten()", f"{last} * 1")
        both = frozenset((1,))
        ways: list[tuple[str, frozenset[int]]] = [
            *[(last, frozenset())] * 8,
            (f"({last}, {other})", frozenset()),
            (f"({last}, {other})", both),
            (f"({last}, {self.dice.choice(views)})", frozenset()),
            (f"({last}, {self.dice.choice(views)})", both),
            (f"[{last}, {last}]", self.dice.choice((frozenset(), both))),
            (f"({last}, {aside}, None, {aside}.shape[0])", both),
            (f"({last}, ({other} > 0), {other}.argmax(-1))", frozenset()),
            (f"{{'a': {last}, 'b': {other}, 'c': {other}.detach()}}", both),
            (f"{{'a': {last}, 'b': [{other}, ({other} * 2,)]}}", frozenset((2,))),
        ]
        return self.dice.choice(ways)

    def _source(self, arguments: list[str], returned: str) -> str:
        setup = "\n".join(f"        {s}" for s in self.setup)
        body = "\n".join(f"        {b}" for b in self.body)
        return (
            f"{PRELUDE}\n\nclass Model(nn.Module):\n    def __init__(self):\n"
            f"        super().__init__()\n{setup}\n\n"
            f"    def forward(self, {', '.join(arguments)}):\n{body}\n        return {returned}\n"
        )


def _shape(name: str, writer: _Writer) -> Iterator[int]:
    shape: tuple[int, ...] = tuple(writer.space[name].shape) or (1,)
    return shape  # type: ignore[return-value]


def _made(seed: int, source: str, first: dict[str, Tensor], draw: int) -> RandomModule:
    file = f"<random module {seed}.{draw}>"
    # Tracing and error messages look the source up.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = ModuleType(f"random_module_{seed}_{draw}")
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, file, "exec"), module.__dict__)
    except SyntaxError as error:
        raise RuntimeError(source) from error
    kept = {n: v.detach() for n, v in first.items()}

    def build() -> nn.Module:
        torch.manual_seed(draw)
        model: nn.Module = module.Model()
        return model

    def inputs() -> tuple[Tensor, ...]:
        # Copies have the layout of the originals.
        return tuple(
            v.clone().requires_grad_(first[n].requires_grad)
            if first[n].requires_grad
            else v.clone()
            for n, v in kept.items()
        )

    return RandomModule(seed, source, build, inputs)
