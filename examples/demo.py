"""Run memopt's demo: `python -m examples.demo` from the repository's root.

A torchvision without compiled operators (no CPU build exists on some machines) needs two of them
declared before it can be imported; the shim does that, only where it is needed.
"""

from __future__ import annotations

from memopt.demo import main
from tests.zoo import torchvision_shim  # noqa: F401  (declares what torchvision misses)

if __name__ == "__main__":
    main()
