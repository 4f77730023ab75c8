"""Optimizers that can be named instead of being passed."""

from __future__ import annotations

from memopt.models.device import Device

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
    """Return the name as the list spells it, whatever its case and the spaces around it.

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


def in_8_bits(name: str) -> str | None:
    """Return the same optimizer with its state in 8 bits; None: there is none, or it is the one."""
    other = f"{name.partition('-')[0]}-8bit"
    return other if other in OPTIMIZERS and other != name else None


_PASSES = {"sgd": 3, "sgd-momentum": 8, "adam": 18, "adamw": 20}
"""How often torch's `foreach` update reads or writes tensors of the parameters' size. Of AdamW: 2
for the parameter's mul_, 3 for lerp_, 5 for mul_ and addcmul_ of the second moment, 6 for its root,
div and add, 4 for addcdiv_."""


def update_bytes(name: str, gradient_bytes: int, state_bytes: int) -> int:
    """Return the bytes that an optimizer's update reads and writes.

    Args:
        name: of `OPTIMIZERS`, or of a class of torch's; "none": there is no update. For others,
            and those whose state is of another precision, one kernel reads and writes everything
            once.
        gradient_bytes: of the trained parameters, or as much.
        state_bytes: of the optimizer.
    """
    if name == "none":
        return 0
    passes = _PASSES.get("sgd-momentum" if name == "SGD" and state_bytes else name.lower())
    return passes * gradient_bytes if passes else 3 * gradient_bytes + 2 * state_bytes


def update_s(name: str, gradient_bytes: int, state_bytes: int, device: Device) -> float:
    """Return the seconds of an optimizer's update on a device, which memory bounds."""
    rate = device.memory_bytes_per_s * device.memory_fraction
    return update_bytes(name, gradient_bytes, state_bytes) / rate
