"""Alternative implementations of operators (MONeT §3), as kernels over the captured graph."""

from memopt.kernels.attach import FAMILIES as FAMILIES
from memopt.kernels.attach import attach as attach
from memopt.kernels.attach import with_implementations as with_implementations
from memopt.kernels.kernel import Kernel as Kernel
from memopt.kernels.site import Sites as Sites
