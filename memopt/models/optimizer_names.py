"""Optimizers that can be named instead of being passed."""

from __future__ import annotations

OPTIMIZERS = (
    "sgd",
    "sgd-momentum",
    "adam",
    "adamw",
    "adam-fp32",
    "adamw-fp32",
    "adam-8bit",
    "adamw-8bit",
)


def optimizer_name(name: str) -> str:
    """Return the name, in the list's case and without spaces around it.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    found = name.strip().lower()
    if found not in OPTIMIZERS:
        raise ValueError(
            f"unknown optimizer {name!r}; memopt knows {', '.join(OPTIMIZERS)}, or pass a "
            "torch.optim instance"
        )
    return found
