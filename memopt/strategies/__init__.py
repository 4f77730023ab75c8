"""Every strategy memopt knows by name, in plain sight."""

from memopt.strategies.base import Progress as Progress
from memopt.strategies.base import Solution as Solution
from memopt.strategies.base import Status as Status
from memopt.strategies.base import Strategy as Strategy
from memopt.strategies.rotor.persistent import Rotor as Rotor
from memopt.strategies.rotor.sequential import Sequential as Sequential
from memopt.strategies.store_all import StoreAll as StoreAll

STRATEGIES: tuple[Strategy, ...] = (
    StoreAll(),
    Sequential(),
    Rotor(),
)


def resolve(strategy: str | Strategy) -> Strategy:
    """The strategy of a name, or the user's own instance.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if isinstance(strategy, Strategy):
        return strategy
    for known in STRATEGIES:
        if known.name == strategy:
            return known
    names = ", ".join(known.name for known in STRATEGIES)
    raise ValueError(f"unknown strategy {strategy!r}; memopt has: {names}, or pass an instance")
