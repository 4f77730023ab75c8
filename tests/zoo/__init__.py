"""The model families that tests and benchmarks share.

    from tests.zoo import FAMILIES, call, get

    family = get("resnet50")
    model, inputs = family.build("tiny"), family.inputs("tiny")
    loss = family.loss(call(model, inputs))

FAMILIES are the fourteen that memopt promises to handle; VARIANTS are more, for special cases and
for benchmarks.
"""

from __future__ import annotations

from tests.zoo import language, vision
from tests.zoo.family import Family as Family
from tests.zoo.family import Inputs as Inputs
from tests.zoo.family import Size as Size
from tests.zoo.family import call as call

FAMILIES: tuple[Family, ...] = vision.FAMILIES + language.FAMILIES
VARIANTS: tuple[Family, ...] = vision.VARIANTS + language.VARIANTS
ALL: tuple[Family, ...] = FAMILIES + VARIANTS


def get(name: str) -> Family:
    """The family or variant of that name."""
    for family in ALL:
        if family.name == name:
            return family
    raise KeyError(f"no model {name!r} in the zoo; there are {', '.join(f.name for f in ALL)}")
