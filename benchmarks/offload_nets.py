"""Chains that resemble the networks of Offloading §6, from layer shapes and a roofline.

They stand in for captured models where speed matters more than fidelity: every layer is priced by
its flops and bytes on a V100-PCIe, float32. The stages are the paper's: every part that is not
linear (a residual block, a dense block, an inception block) is one stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from memopt.models.chain import Chain, Stage
from memopt.models.device import Device

V100_PCIE = Device(
    name="V100-PCIe",
    capacity_bytes=16 * 10**9,
    to_host_bytes_per_s=12.2e9,
    duplex=False,
    flops_per_s={"float32": 14.1e12},
    memory_bytes_per_s=900e9,
    launch_latency_s=5e-6,
    flops_fraction=0.6,
    memory_fraction=0.75,
    source="Offloading §6.1; NVIDIA's data sheet for the rates",
)


@dataclass
class Network:
    """A network under construction: the current shape and the stages so far."""

    batch: int
    channels: int
    height: int
    width: int
    device: Device = V100_PCIE
    stages: list[Stage] = field(default_factory=list)
    forward_s: float = 0.0
    backward_s: float = 0.0
    saved_bytes: int = 0
    largest_bytes: int = 0
    parameter_bytes: int = 0
    stage_parameter_bytes: int = 0

    def tensor_bytes(self, channels: int | None = None) -> int:
        """Bytes of an activation of the current size."""
        return 4 * self.batch * (channels or self.channels) * self.height * self.width

    def price(self, flops: float, moved_bytes: float, kernels: int = 1) -> None:
        """Add one layer's time: backward is twice the forward's work."""
        rate = self.device.flops_per_s["float32"] * self.device.flops_fraction
        bandwidth = self.device.memory_bytes_per_s * self.device.memory_fraction
        time_s = max(flops / rate, moved_bytes / bandwidth)
        self.forward_s += time_s + kernels * self.device.launch_latency_s
        self.backward_s += 2 * time_s + 2 * kernels * self.device.launch_latency_s

    def conv(self, out: int, kernel: tuple[int, int], stride: int = 1, padded: bool = True) -> None:
        """Convolution, batch norm, ReLU in place: two tensors are saved."""
        before = self.tensor_bytes()
        flops = 2.0 * self.channels * kernel[0] * kernel[1]
        parameters = 4 * self.channels * kernel[0] * kernel[1] * out
        if padded:
            self.height, self.width = -(-self.height // stride), -(-self.width // stride)
        else:
            self.height = (self.height - kernel[0]) // stride + 1
            self.width = (self.width - kernel[1]) // stride + 1
        self.channels = out
        after = self.tensor_bytes()
        self.price(flops * after / 4, before + after)
        self.price(0, 4 * after, 2)
        self.save(2 * after, after)
        self.stage_parameter_bytes += parameters + 8 * out

    def pool(self, stride: int, padded: bool = True) -> None:
        """Pooling; the output and the indices are saved."""
        before = self.tensor_bytes()
        if padded:
            self.height, self.width = -(-self.height // stride), -(-self.width // stride)
        else:
            self.height, self.width = (
                (self.height - 3) // stride + 1,
                (self.width - 3) // stride + 1,
            )
        self.price(0, before + self.tensor_bytes())
        self.save(3 * self.tensor_bytes(), before)

    def save(self, size_bytes: int, largest_bytes: int) -> None:
        """Count saved bytes, and the largest gradient inside the stage."""
        self.saved_bytes += size_bytes
        self.largest_bytes = max(self.largest_bytes, largest_bytes)

    def close(self, name: str) -> None:
        """End the stage."""
        output = self.tensor_bytes()
        self.stages.append(
            Stage(
                self.forward_s,
                self.backward_s,
                output_bytes=output,
                saved_bytes=max(output, self.saved_bytes),
                gradient_bytes=output,
                forward_overhead_bytes=self.largest_bytes // 8,
                backward_overhead_bytes=self.largest_bytes,
                parameter_gradient_bytes=self.stage_parameter_bytes,
                name=name,
            )
        )
        self.parameter_bytes += self.stage_parameter_bytes
        self.forward_s = self.backward_s = 0.0
        self.saved_bytes = self.largest_bytes = self.stage_parameter_bytes = 0

    def chain(self, image: int) -> Chain:
        """Classifier, loss, and the whole chain."""
        self.price(0, self.tensor_bytes())
        self.height = self.width = 1
        self.stage_parameter_bytes += 4 * self.channels * 1000
        self.price(2.0 * self.batch * self.channels * 1000, self.stage_parameter_bytes)
        self.save(self.tensor_bytes() + 4000 * self.batch, 0)
        self.channels = 1000
        self.close("classifier")
        self.stages.append(Stage(1e-5, 1e-5, 4, 4000 * self.batch, 4, name="loss"))
        return Chain(12 * self.batch * image * image, self.stages, self.parameter_bytes)


def resnet(depth: int, batch: int, image: int) -> Chain:
    """ResNet-18 to 152; a residual block is a stage."""
    layers = {
        18: (2, 2, 2, 2),
        34: (3, 4, 6, 3),
        50: (3, 4, 6, 3),
        101: (3, 4, 23, 3),
        152: (3, 8, 36, 3),
    }[depth]
    net = Network(batch, 3, image, image)
    net.conv(64, (7, 7), 2)
    net.close("stem")
    net.pool(2)
    net.close("pool")
    for group, count in enumerate(layers):
        width = 64 * 2**group
        for index in range(count):
            stride = 2 if group and not index else 1
            if depth < 50:
                net.conv(width, (3, 3), stride)
                net.conv(width, (3, 3))
            else:
                net.conv(width, (1, 1))
                net.conv(width, (3, 3), stride)
                net.conv(4 * width, (1, 1))
            if not index:
                net.save(2 * net.tensor_bytes(), 0)
            net.close(f"layer{group + 1}.{index}")
    return net.chain(image)


def densenet(depth: int, batch: int, image: int) -> Chain:
    """DenseNet-121 to 201; a dense layer x ↦ cat(x, f(x)) is a stage, as torchvision had it."""
    growth, first, layers = {
        121: (32, 64, (6, 12, 24, 16)),
        161: (48, 96, (6, 12, 36, 24)),
        169: (32, 64, (6, 12, 32, 32)),
        201: (32, 64, (6, 12, 48, 32)),
    }[depth]
    net = Network(batch, 3, image, image)
    net.conv(first, (7, 7), 2)
    net.close("stem")
    net.pool(2)
    net.close("pool")
    for group, count in enumerate(layers):
        for index in range(count):
            channels = net.channels
            net.price(0, 4 * net.tensor_bytes(), 2)
            net.save(net.tensor_bytes(), net.tensor_bytes())
            net.conv(4 * growth, (1, 1))
            net.conv(growth, (3, 3))
            net.channels = channels + growth
            net.price(0, 2 * net.tensor_bytes())
            net.save(net.tensor_bytes(), net.tensor_bytes())
            net.close(f"dense{group + 1}.{index}")
        if group < 3:
            net.conv(net.channels // 2, (1, 1))
            net.pool(2)
            net.close(f"transition{group + 1}")
    return net.chain(image)


Branch = tuple[tuple[int, tuple[int, int], int], ...]


def inception(_depth: int, batch: int, image: int) -> Chain:
    """Inception-v3; an inception block is a stage."""
    net = Network(batch, 3, image, image)
    for out, kernel, stride, padded in ((32, 3, 2, False), (32, 3, 1, False), (64, 3, 1, True)):
        net.conv(out, (kernel, kernel), stride, padded)
        net.close(f"conv{out}")
    net.pool(2, padded=False)
    net.close("pool1")
    net.conv(80, (1, 1))
    net.close("conv80")
    net.conv(192, (3, 3), padded=False)
    net.close("conv192")
    net.pool(2, padded=False)
    net.close("pool2")
    for index, out in enumerate((32, 64, 64)):
        five: Branch = ((48, (1, 1), 1), (64, (5, 5), 1))
        three: Branch = ((64, (1, 1), 1), (96, (3, 3), 1), (96, (3, 3), 1))
        _inception_block(net, (((64, (1, 1), 1),), five, three, ((out, (1, 1), 1),)), f"5{index}")
    _inception_block(
        net,
        (((384, (3, 3), 2),), ((64, (1, 1), 1), (96, (3, 3), 1), (96, (3, 3), 2))),
        "6a",
        passed=net.channels,
    )
    for index, c in enumerate((128, 160, 160, 192)):
        seven: Branch = ((c, (1, 1), 1), (c, (1, 7), 1), (192, (7, 1), 1))
        double: Branch = ((c, (1, 1), 1), *((c, (7, 1), 1),) * 3, (192, (1, 7), 1))
        single: Branch = ((192, (1, 1), 1),)
        _inception_block(net, (single, seven, double, single), f"6{index + 1}")
    three = ((192, (1, 1), 1), (320, (3, 3), 2))
    seven = ((192, (1, 1), 1), (192, (1, 7), 1), (192, (7, 1), 1), (192, (3, 3), 2))
    _inception_block(net, (three, seven), "7a", passed=net.channels)
    for index in range(2):
        wide: Branch = ((384, (1, 1), 1), (768, (1, 3), 1))
        deep: Branch = ((448, (1, 1), 1), (384, (3, 3), 1), (768, (1, 3), 1))
        _inception_block(net, (((320, (1, 1), 1),), wide, deep, ((192, (1, 1), 1),)), f"7{index}")
    return net.chain(image)


def _inception_block(
    net: Network, branches: tuple[Branch, ...], name: str, passed: int = 0
) -> None:
    before = (net.channels, net.height, net.width)
    channels = passed
    for branch in branches:
        net.channels, net.height, net.width = before
        for out, kernel, stride in branch:
            net.conv(out, kernel, stride)
        channels += net.channels
    net.channels = channels
    net.save(net.tensor_bytes(), net.tensor_bytes())
    net.close(name)


FAMILIES: dict[str, tuple[Callable[[int, int, int], Chain], tuple[int, ...]]] = {
    "resnet": (resnet, (18, 34, 50, 101, 152)),
    "densenet": (densenet, (121, 161, 169, 201)),
    "inception": (inception, (3,)),
}
