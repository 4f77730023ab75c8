"""Every strategy memopt knows by name."""

from memopt.models.status import Status as Status
from memopt.programs.solution import Solution as Solution
from memopt.strategies.auto.strategy import Auto as Auto
from memopt.strategies.base import Progress as Progress
from memopt.strategies.base import Strategy as Strategy
from memopt.strategies.singles import SINGLE_STRATEGIES
from memopt.strategies.singles import AutoSwap as AutoSwap
from memopt.strategies.singles import Checkmate as Checkmate
from memopt.strategies.singles import CheckmateRounding as CheckmateRounding
from memopt.strategies.singles import DynProg as DynProg
from memopt.strategies.singles import Greedy as Greedy
from memopt.strategies.singles import Joint as Joint
from memopt.strategies.singles import Monet as Monet
from memopt.strategies.singles import OffloadExact as OffloadExact
from memopt.strategies.singles import OffloadGraph as OffloadGraph
from memopt.strategies.singles import Olla as Olla
from memopt.strategies.singles import Revolve as Revolve
from memopt.strategies.singles import Rotor as Rotor
from memopt.strategies.singles import RotorFree as RotorFree
from memopt.strategies.singles import RotorMenus as RotorMenus
from memopt.strategies.singles import RotorOptimal as RotorOptimal
from memopt.strategies.singles import Sequential as Sequential
from memopt.strategies.singles import StoreAll as StoreAll
from memopt.strategies.singles import Tflms as Tflms
from memopt.strategies.singles import Vdnn as Vdnn

STRATEGIES: tuple[Strategy, ...] = (*SINGLE_STRATEGIES, Auto())


def resolve(strategy: str | Strategy) -> Strategy:
    """Return the strategy of a name, or the user's own instance.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if isinstance(strategy, Strategy):
        return strategy
    for known in STRATEGIES:
        if known.name == strategy:
            return known
    names = ", ".join(known.name for known in STRATEGIES)
    said = repr(strategy) if isinstance(strategy, str) else f"a {type(strategy).__name__}"
    raise ValueError(f"unknown strategy {said}; memopt has: {names}, or pass an instance")
