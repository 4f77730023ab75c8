"""Every strategy memopt knows by name, in plain sight."""

from memopt.strategies.auto.strategy import Auto as Auto
from memopt.strategies.base import Progress as Progress
from memopt.strategies.base import Solution as Solution
from memopt.strategies.base import Status as Status
from memopt.strategies.base import Strategy as Strategy
from memopt.strategies.monet.rotor_menus import RotorMenus as RotorMenus
from memopt.strategies.monet.strategy import Checkmate as Checkmate
from memopt.strategies.monet.strategy import CheckmateRounding as CheckmateRounding
from memopt.strategies.monet.strategy import Monet as Monet
from memopt.strategies.offload.autoswap import AutoSwap as AutoSwap
from memopt.strategies.offload.dynprog import DynProg as DynProg
from memopt.strategies.offload.exact import OffloadExact as OffloadExact
from memopt.strategies.offload.graph import OffloadGraph as OffloadGraph
from memopt.strategies.offload.greedy import Greedy as Greedy
from memopt.strategies.offload.tflms import Tflms as Tflms
from memopt.strategies.offload.vdnn import Vdnn as Vdnn
from memopt.strategies.olla.strategy import Olla as Olla
from memopt.strategies.rotor.floating import RotorFree as RotorFree
from memopt.strategies.rotor.floating import RotorOptimal as RotorOptimal
from memopt.strategies.rotor.persistent import Revolve as Revolve
from memopt.strategies.rotor.persistent import Rotor as Rotor
from memopt.strategies.rotor.sequential import Sequential as Sequential
from memopt.strategies.store_all import StoreAll as StoreAll

STRATEGIES: tuple[Strategy, ...] = (
    StoreAll(),
    Sequential(),
    Revolve(),
    Rotor(),
    RotorOptimal(),
    RotorFree(),
    Greedy(),
    DynProg(),
    OffloadExact(),
    OffloadGraph(),
    Vdnn(),
    AutoSwap(),
    Tflms(),
    RotorMenus(),
    Checkmate(),
    CheckmateRounding(),
    Monet(),
    Olla(),
    Auto(),
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
