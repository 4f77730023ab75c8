"""Lists every strategy that makes its plans itself; `auto` chooses among them."""

from memopt.strategies.base import Strategy
from memopt.strategies.joint.strategy import Joint as Joint
from memopt.strategies.monet.checkmate_strategies import Checkmate as Checkmate
from memopt.strategies.monet.checkmate_strategies import CheckmateRounding as CheckmateRounding
from memopt.strategies.monet.rotor_menus import RotorMenus as RotorMenus
from memopt.strategies.monet.strategy import Monet as Monet
from memopt.strategies.offload.autoswap import AutoSwap as AutoSwap
from memopt.strategies.offload.dynprog import DynProg as DynProg
from memopt.strategies.offload.dynprog import Greedy as Greedy
from memopt.strategies.offload.exact import OffloadExact as OffloadExact
from memopt.strategies.offload.graph import OffloadGraph as OffloadGraph
from memopt.strategies.offload.yardsticks import Tflms as Tflms
from memopt.strategies.offload.yardsticks import Vdnn as Vdnn
from memopt.strategies.olla.strategy import Olla as Olla
from memopt.strategies.rotor import Revolve as Revolve
from memopt.strategies.rotor import Rotor as Rotor
from memopt.strategies.rotor import RotorFree as RotorFree
from memopt.strategies.rotor import RotorOptimal as RotorOptimal
from memopt.strategies.rotor import Sequential as Sequential
from memopt.strategies.store_all import StoreAll as StoreAll

SINGLE_STRATEGIES: tuple[Strategy, ...] = (
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
    Joint(),
)
