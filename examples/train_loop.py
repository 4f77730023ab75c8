"""A plain training loop under a budget: sixteen lines of yours and one of memopt's.

python -m examples.train_loop
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

import memopt


def main(epochs: int = 2) -> float:
    """Train on scikit-learn's digits; the last loss."""
    torch.manual_seed(0)
    digits = load_digits()
    data = torch.utils.data.TensorDataset(
        torch.tensor(digits.images, dtype=torch.float32).flatten(1), torch.tensor(digits.target)
    )
    batches = torch.utils.data.DataLoader(data, batch_size=128, shuffle=True)
    hidden = [nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
    model = nn.Sequential(nn.Linear(64, 512), *hidden, nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    memopt.wrap(model, budget="min", optimizer=optimizer)

    loss = torch.tensor(0.0)
    for _ in range(epochs):
        model.train()
        for images, targets in batches:  # the last batch is smaller: it gets a plan of its own
            loss = nn.functional.cross_entropy(model(images), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(batches.dataset.tensors[0][:256])
    print(f"loss {loss.item():.3f}; {model.calls}")
    for plan in model.memopt.plans:
        print(plan)
    return loss.item()


if __name__ == "__main__":
    main()
