"""Train a PyTorch model within a memory budget: capture, plan, check and run one training step.

Importing memopt imports neither torch nor a solver: cost models can be built and planned without.
"""

import typing as _typing

from memopt.api.comparing import compare as compare
from memopt.api.comparison import Cell as Cell
from memopt.api.comparison import Comparison as Comparison
from memopt.api.curve import curve as curve
from memopt.api.deferred import DeferredPlan as DeferredPlan
from memopt.api.fits import Fits as Fits
from memopt.api.fits import fits as fits
from memopt.api.ladder import ladder as ladder
from memopt.api.opaque import opaque as opaque
from memopt.api.plan import Plan as Plan
from memopt.api.plan import load as load
from memopt.api.planning import plan as plan
from memopt.api.planning import profile as profile
from memopt.api.planning import strategies as strategies
from memopt.api.sharding import shard as shard
from memopt.api.wrap import running as running
from memopt.api.wrap import unwrap as unwrap
from memopt.api.wrap import wrap as wrap
from memopt.errors import CaptureError as CaptureError
from memopt.errors import ExecutionError as ExecutionError
from memopt.errors import GuardError as GuardError
from memopt.errors import InfeasibleBudgetError as InfeasibleBudgetError
from memopt.errors import InvalidProgramError as InvalidProgramError
from memopt.errors import MemoptError as MemoptError
from memopt.errors import PlanFileError as PlanFileError
from memopt.errors import ProfileError as ProfileError
from memopt.errors import RankError as RankError
from memopt.models.chain import Chain as Chain
from memopt.models.chain import Stage as Stage
from memopt.models.device import Device as Device
from memopt.models.graph import Graph as Graph
from memopt.models.graph import Operator as Operator
from memopt.models.graph import Tensor as Tensor
from memopt.models.instances import PaperInstance as PaperInstance
from memopt.models.instances import instances as instances
from memopt.models.mesh import Mesh as Mesh
from memopt.models.network import Network as Network
from memopt.programs.instructions import Program as Program
from memopt.report.step_check import StepCheck as StepCheck
from memopt.strategies import Status as Status
from memopt.strategies import Strategy as Strategy

if _typing.TYPE_CHECKING:
    from memopt.integrations.partitioner import Partitioner
    from memopt.models.budget import WrittenBudget


def measure_device(device: object = None) -> Device:
    """Measure this machine's Device in a few seconds: link, memory bandwidth, rates by kind of
    operator. See `memopt.pricing.device_measure`; imports torch."""
    from memopt.pricing.device_measure import measure_device as measure

    return measure(device)  # type: ignore[arg-type]  # torch's own words name a device


def partitioner(
    budget: "WrittenBudget", strategy: str | Strategy = "rotor", device: Device | str | None = None
) -> "Partitioner":
    """Make a partitioner for `torch.compile(options={"custom_partitioner_fn": ...})`: a plan says
    what is saved and what is recomputed, Inductor compiles both halves. Its `compile(model,
    inputs)` measures real steps, and plans again until one keeps the budget.

    Args:
        budget: as for `plan`; in `compile`, a share is one of the peak of the step that torch
            compiles without memopt.
        strategy: a name or a Strategy that recomputes and moves nothing.
        device: the device whose costs are estimated: a preset's name or a Device; None: this
            machine, measured in a few seconds.

    Returns:
        A `memopt.integrations.partitioner.Partitioner`; imports torch.

    Raises:
        MemoptError: the strategy only moves tensors.
    """
    from memopt.integrations.partitioner import Partitioner

    return Partitioner(budget, strategy, device)


__version__ = "0.1.0"
