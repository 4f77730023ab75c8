"""Alternative implementations of operators (MONeT §3), as kernels over the captured graph."""

from memopt.implementations.attach import FAMILIES as FAMILIES
from memopt.implementations.attach import attach as attach
from memopt.implementations.attach import with_implementations as with_implementations
from memopt.implementations.kernel import Kernel as Kernel
from memopt.implementations.site import Sites as Sites
