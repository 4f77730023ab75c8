"""A model whose parameters, gradients and AdamW state are four times the budget.

python -m examples.train_what_does_not_fit [--repeated] [--picture FILE.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import memopt


def main(steps: int = 3, picture: Path | None = None, *, repeated: bool = False) -> memopt.Plan:
    """Train a few steps and evaluate; the plan."""
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(192, 192), nn.Tanh()) for _ in range(9)]
    model = nn.Sequential(nn.Linear(64, 192), *hidden, nn.Linear(192, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loss_fn = nn.functional.cross_entropy
    x, y = torch.randn(8, 64), torch.randint(0, 10, (8,))
    parameters = sum(p.nbytes for p in model.parameters())  # 4 times as much with the rest

    plan = memopt.plan(
        model,
        x,
        loss_fn=loss_fn,
        targets=(y,),
        optimizer=optimizer,
        strategy="offload-graph",
        movable="all",
        steady_state=repeated,  # the last copies to the host overlap the next step's forward
        budget=parameters,
        device=memopt.Device(to_host_bytes_per_s=2e9),  # or memopt.measure_device()
        progress=False,
    )
    print(plan)
    step = plan.train_step(model, loss_fn, optimizer)
    for _ in range(steps):
        loss = step(x, targets=(y,))
    print(f"loss {loss.item():.3f}; {step.host_bytes:,} bytes live on the host")
    with step.parameters_on("cpu") as whole, torch.no_grad():
        print(f"right: {(whole(x).argmax(1) == y).sum()} of {len(y)}")
    if picture is not None:
        axes = plan.plot("timeline")
        axes.figure.savefig(picture, dpi=110, bbox_inches="tight")
    return plan


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeated", action="store_true", help="plan a step that is repeated")
    parser.add_argument("--picture", type=Path, help="draw the step's three streams")
    options = parser.parse_args()
    main(picture=options.picture, repeated=options.repeated)
