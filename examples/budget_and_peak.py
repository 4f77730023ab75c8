"""A budget, and the peak that is measured: torch.compile's knob beside memopt's budget.

`activation_memory_budget` is a share of what autograd would save. A step's peak has more in it, so
that a smaller share may need more memory (pytorch 197838). memopt's budget is the step's peak.

    python -m examples.budget_and_peak --out docs/gallery/budget-and-peak.png

trains nothing: it measures one step per budget, on the CPU, and draws both.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import memopt
from benchmarks.steps import CPU, peak_of

WIDTH, LAYERS, WORDS = 192, 6, 512
SHARES = (1.0, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)


class Block(nn.Module):
    """Attention and a gated feed-forward, as Llama has them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → the same."""
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.between(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Language(nn.Module):
    """A small language model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, tokens) → the mean loss."""
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def compiled_peak(ids: Tensor, share: float) -> int:
    """Measure the peak of a step above parameters and inputs, compiled with torch's knob."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Language()
    with torch._functorch.config.patch(activation_memory_budget=share):
        run = torch.compile(model, backend="aot_eager_decomp_partition")
        return peak_of(model, lambda: run(ids).backward(), CPU)


def planned_peak(ids: Tensor, budget: int) -> int | None:
    """Measure the peak above parameters and inputs under a plan; None: nothing fits the budget."""
    torch.manual_seed(0)
    model = Language()
    held = sum(p.nbytes for p in model.parameters()) + ids.nbytes
    try:
        plan = memopt.plan(model, ids, budget=held + budget, strategy="rotor", progress=False)
    except memopt.InfeasibleBudgetError:
        return None
    planned = plan.apply(model)
    return peak_of(model, lambda: planned(ids).backward(), CPU)


def main(out: Path | None, shares: tuple[float, ...] = SHARES) -> list[tuple[int, int]]:
    """Print and draw measured peaks; return (memopt's budget, its peak) in bytes, for those shares
    of the largest peak that a plan fits."""
    ids = torch.randint(WORDS, (8, 128), generator=torch.Generator().manual_seed(0))
    theirs = {share: compiled_peak(ids, share) for share in shares}
    most = max(theirs.values())
    rows: dict[float, tuple[int, int]] = {}
    print("share | torch.compile's peak MiB | memopt's budget MiB | memopt's peak MiB")
    for share in shares:
        # memopt's knob is bytes: the same share of the largest of these peaks.
        budget = int(share * most)
        own = planned_peak(ids, budget)
        shown = "none fits" if own is None else f"{own / 2**20:.1f}"
        print(f"{share:.2f} | {theirs[share] / 2**20:.1f} | {budget / 2**20:.1f} | {shown}")
        if own is not None:
            rows[share] = budget, own
    if out is not None:
        draw(out, theirs, {share: own for share, (_, own) in rows.items()}, most)
    return list(rows.values())


def draw(out: Path, theirs: dict[float, int], own: dict[float, int], most: int) -> None:
    """Draw measured peaks over budgets, as shares of the largest peak."""
    from memopt.report.style import new_figure

    figure, axes = new_figure()
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1, label="peak = budget")
    for label, marker, peaks in (
        ("torch.compile, activation_memory_budget", "o", theirs),
        ("memopt, budget of the peak", "s", own),
    ):
        shares = sorted(peaks)
        axes.plot(shares, [peaks[x] / most for x in shares], marker=marker, label=label)
    axes.set(xlabel="budget", ylabel="measured peak", xlim=(0, 1.02), ylim=(0, 1.05))
    axes.legend()
    figure.savefig(out, dpi=110)
    print(f"wrote {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    main(parser.parse_args().out)
