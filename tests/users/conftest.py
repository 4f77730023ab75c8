"""transformers and torchmetrics import torchvision where it is installed."""

from tests.zoo import torchvision_shim  # noqa: F401  # declares what a CPU torch lacks
