"""Offloading strategies (Offloading §4–6), and an exact solver, which the paper does not have."""

from memopt.strategies.offload.autoswap import AutoSwap as AutoSwap
from memopt.strategies.offload.dynprog import DynProg as DynProg
from memopt.strategies.offload.dynprog import Greedy as Greedy
from memopt.strategies.offload.exact import OffloadExact as OffloadExact
from memopt.strategies.offload.yardsticks import Tflms as Tflms
from memopt.strategies.offload.yardsticks import Vdnn as Vdnn
