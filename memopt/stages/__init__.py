"""The stages between a model and its plan, in the order in which they run.

`memopt.plan` runs `STAGES` over the step, and the plan records which ran, with which options. If a
plan is applied to a model that has to be captured again, the same stages run again, as recorded.
"""

from memopt.stages.base import LastCapture as LastCapture
from memopt.stages.base import PlanStage as PlanStage
from memopt.stages.base import Preparation as Preparation
from memopt.stages.base import Recapture as Recapture
from memopt.stages.base import plan_again as plan_again
from memopt.stages.base import prepared as prepared
from memopt.stages.base import recaptured as recaptured
from memopt.stages.stages import STAGES as STAGES
from memopt.stages.stages import profiled_for as profiled_for
