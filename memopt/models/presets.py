"""Devices by name, each figure with its source.

Peaks are the makers' data sheets. What of them is achieved comes from public measurements:

- matrix products: the Maximum Achievable Matmul FLOPS table of S. Bekman's "Machine Learning
  Engineering" (bfloat16, best shape): A100 SXM 271 of 312, H100 SXM 794 of 989 and "H200 is the
  same" tera-operations per second;
- fused attention: FlashAttention-2 (arXiv:2307.08691) reaches 50 to 73% of an A100's peak, and 35%
  of an H100's (arXiv:2407.08608, abstract);
- convolutions: NVIDIA's ResNet-50 v1.5 for PyTorch (DeepLearningExamples) trains 938 images/s
  in TF32 and 2,470 in mixed precision on an A100 80 GB, 1,200 in mixed precision on a V100 16 GB:
  the rates below are those at which the estimate of ResNet-50 takes just as long; on Hopper the
  same shares of the peak are assumed;
- device memory: 2,903 of 3,350 GB/s for copies on an H100 SXM, and 46.8 / 54.8 GB/s device to host
  / host to device of PCIe 5.0's 63 (AI@GT's benchmarks of Voltage Park's H100 cluster); 83% of the
  900 GB/s of a V100 (Jia et al., arXiv:1804.06826);
- capacities: "total capacity" in the messages of torch's out-of-memory errors, less 0.6 GiB for the
  CUDA context, which torch's allocator never gets.
- networks: NCCL's rings reach 360 GB/s of an H100's NVLink ("exactly what we'd expect", NVIDIA in
  nccl-tests issue 326), 46 to 48 of the 50 GB/s of an NDR adapter, of which an HGX H100 has one for
  each GPU (nccl-tests issue 290), and 208 GB/s of an A100's NVLink (nccl-tests issue 178); its
  protocols' latencies and shares are those of its own tuner (src/graph/tuning.cc: baseLat, hwLat;
  LL128 hands on 120 of 128 bytes, LL one half, with 141 GB/s at most on Hopper).

- updates on the host: DeepSpeed's CPU-Adam steps 10 billion float32 parameters in 2.57 s on two
  Xeon 8168 (ZeRO-Offload, arXiv:2101.06840, table 4), which reads and writes 28 bytes for each:
  109 GB/s, 0.43 of their 256 GB/s (6 × DDR4-2666 each); torch's fused step does the same work in
  the same single pass. That share is assumed of one socket: 307 GB/s beside an H100 (Xeon 8480C,
  8 × DDR5-4800), 205 beside an A100 (EPYC 7742, 8 × DDR4-3200), 486 of Grace (STREAM,
  arXiv:2407.07850).

Where a device has no public figure, that of its successor is assumed, and its `source` says so.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches

from memopt.models.device import Device
from memopt.models.network import Network, Protocol

_GIB = 2**30
_CUDA_CONTEXT_BYTES = int(0.6 * _GIB)
_LAUNCH_LATENCY_S = 5e-6
"""Time between small kernels in a stream: 3.8 µs launched back to back from C (NVIDIA, "Getting
started with CUDA graphs"), a little more from Python."""
_TRANSFER_LATENCY_S = 10e-6


_PRODUCT_EXPOSURE = 3.5
"""Fitted to half of the sources in docs/results/published.md, where the other half shows the same.
Assumed for what is not an A100 or H100."""

_UPDATE_SHARE = 0.43
"""Share of the host's memory bandwidth that an optimizer's step on the host reaches."""

_NCCL = (
    Protocol(8.4e-6, 3.4e-6, 14.0e-6, 1.0),
    Protocol(14.0e-6, 1.9e-6, 4.0e-6, 120 / 128),
    Protocol(6.6e-6, 0.6e-6, 2.7e-6, 141 / 360),
)
"""NCCL's protocols Simple, LL128 and LL, by rings."""
HGX_H100 = Network(47e9, 360e9, 8, _NCCL, "NVLink 4, one NDR adapter a GPU; see this module")
HGX_A100 = Network(23.5e9, 208e9, 8, _NCCL, "NVLink 3, one HDR adapter a GPU, at the share of NDR")
SUPERCHIPS = Network(47e9, 47e9, 1, _NCCL, "an NDR adapter for each GH200, one of them in a node")
NVL72 = Network(
    47e9, 720e9, 72, _NCCL, "NVLink 5 (900 GB/s each way) at the share of an H100's, NDR adapters"
)


def _usable_bytes(capacity_gib: float) -> int:
    return int(capacity_gib * _GIB) - _CUDA_CONTEXT_BYTES


def _gpu(
    name: str,
    capacity_gib: float,
    memory_bytes_per_s: float,
    flops_per_s: dict[str, float],
    fractions: tuple[float, float],
    link_bytes_per_s: tuple[float, float],
    source: str,
    network: Network | None = None,
    host_memory_bytes_per_s: float | None = None,
) -> Device:
    return Device(
        name=name,
        capacity_bytes=_usable_bytes(capacity_gib),
        to_host_bytes_per_s=link_bytes_per_s[0],
        from_host_bytes_per_s=link_bytes_per_s[1],
        transfer_latency_s=_TRANSFER_LATENCY_S,
        flops_per_s=flops_per_s,
        memory_bytes_per_s=memory_bytes_per_s,
        launch_latency_s=_LAUNCH_LATENCY_S,
        flops_fraction=fractions[0],
        memory_fraction=fractions[1],
        block_bytes=512,
        kind="cuda",
        source=source,
        network=network,
        product_exposure=_PRODUCT_EXPOSURE,
        host_update_bytes_per_s=(
            None if host_memory_bytes_per_s is None else _UPDATE_SHARE * host_memory_bytes_per_s
        ),
    )


V100_PCIE = _gpu(
    "V100-PCIe-16GB",
    15.77,
    900e9,
    {
        "float64": 7e12,
        "float32": 14e12,
        "float16": 112e12,
        "float16 convolution": 58e12,
    },
    (0.80, 0.83),
    (12.2e9, 12.2e9),
    "NVIDIA's V100 data sheet (PCIe); link 12.2 GB/s: Offloading §6.1; share of peak flops "
    "assumed as on an H100; no bfloat16 units",
)
P100 = _gpu(
    "P100-PCIe-16GB",
    15.90,
    732e9,
    {"float64": 4.7e12, "float32": 9.3e12, "float16": 18.7e12},
    (0.80, 0.75),
    (12.2e9, 12.2e9),
    "NVIDIA's P100 data sheet (PCIe 16 GB); link as the V100's (both PCIe 3.0 ×16); shares assumed",
)
A100 = _gpu(
    "A100-SXM-80GB",
    79.15,
    2039e9,
    {
        "float64": 9.7e12,
        "float32": 19.5e12,
        "tfloat32": 156e12,
        "float16": 312e12,
        "bfloat16": 312e12,
        "bfloat16 attention": 0.62 * 312e12,
        "float16 attention": 0.62 * 312e12,
        "float32 convolution": 33.6e12,
        "bfloat16 convolution": 113e12,
        "float16 convolution": 113e12,
    },
    (0.87, 0.87),
    (23.4e9, 27.4e9),
    "NVIDIA's A100 data sheet; link: PCIe 4.0 ×16 (31.5 GB/s) at the shares measured on an H100; "
    "share of the memory bandwidth as on an H100",
    HGX_A100,
    204.8e9,
)
H100 = _gpu(
    "H100-SXM-80GB",
    79.1,
    3350e9,
    {
        "float64": 33.5e12,
        "float32": 67e12,
        "tfloat32": 494.5e12,
        "float16": 989e12,
        "bfloat16": 989e12,
        "bfloat16 attention": 0.35 * 989e12,
        "float16 attention": 0.35 * 989e12,
        "float32 convolution": 0.22 * 494.5e12,
        "bfloat16 convolution": 0.36 * 989e12,
        "float16 convolution": 0.36 * 989e12,
    },
    (0.80, 0.87),
    (46.8e9, 54.8e9),
    "NVIDIA's H100 data sheet; see memopt.models.presets",
    HGX_H100,
    307.2e9,
)
H200 = replace(
    H100,
    name="H200-SXM-141GB",
    capacity_bytes=_usable_bytes(139.8),
    memory_bytes_per_s=4800e9,
    source="NVIDIA's H200 data sheet; shares and link as on an H100; see memopt.models.presets",
)
_C2C_BYTES_PER_S = 450e9
"""NVLink-C2C between Grace and Hopper, each way: 900 GB/s both ways together (NVIDIA)."""
GH200 = replace(
    H100,
    name="GH200-96GB",
    capacity_bytes=_usable_bytes(94.5),
    to_host_bytes_per_s=297e9,
    from_host_bytes_per_s=375e9,
    memory_bytes_per_s=4000e9,
    memory_fraction=0.85,
    network=SUPERCHIPS,
    host_update_bytes_per_s=_UPDATE_SHARE * 486e9,
    source="NVIDIA's GH200 data sheet (96 GB HBM3, NVLink-C2C 450 GB/s each way); of it 297, 375 "
    "GB/s, and 3.4 of 4 TB/s of device memory, as measured by Schieffer et al., arXiv:2407.07850; "
    "rates as on an H100; capacity assumed from the nominal one",
)
GB200 = _gpu(
    "GB200-186GB",
    184.0,
    8000e9,
    {
        "float64": 40e12,
        "float32": 80e12,
        "tfloat32": 1250e12,
        "float16": 2500e12,
        "bfloat16": 2500e12,
        "bfloat16 attention": 0.35 * 2500e12,
        "float16 attention": 0.35 * 2500e12,
        "float32 convolution": 0.22 * 1250e12,
        "bfloat16 convolution": 0.36 * 2500e12,
        "float16 convolution": 0.36 * 2500e12,
    },
    (0.80, 0.87),
    (0.66 * _C2C_BYTES_PER_S / 2, 0.83 * _C2C_BYTES_PER_S / 2),
    "NVIDIA's Blackwell data sheet, column GB200 NVL72, without sparsity; two GPUs share Grace's "
    "NVLink-C2C (450 GB/s each way), at the shares measured on a GH200; shares of the rates as on "
    "an H100, which nobody published for it; capacity assumed from the nominal one",
    NVL72,
    486e9 / 2,
)


def _card(
    name: str,
    capacity_gib: float,
    memory_gb_per_s: float,
    tera: tuple[float, float, float],
    pcie: int,
    source: str,
    fractions: tuple[float, float] = (0.80, 0.87),
) -> Device:
    """Make a card of a data sheet's dense rates, without sparsity: tera-operations per second in
    float32, TF32, and half precision with float32 sums. Shares of the rates are assumed."""
    plain, tensor, half = (1e12 * rate for rate in tera)
    shares = {"attention": (half, 0.5), "convolution": (half, 0.36)}
    rates = {"float32": plain, "tfloat32": tensor, "bfloat16": half, "float16": half}
    rates["float64"] = plain / 64
    for kind, (rate, share) in shares.items():
        rates |= {f"{dtype} {kind}": share * rate for dtype in ("bfloat16", "float16")}
    rates["float32 convolution"] = 0.22 * tensor
    link = {4: (23.4e9, 27.4e9), 5: (46.8e9, 54.8e9)}[pcie]
    bandwidth = memory_gb_per_s * 1e9
    said = f"{source}; PCIe {pcie}.0 at the shares measured beside an H100; shares assumed"
    return _gpu(name, capacity_gib, bandwidth, rates, fractions, link, said)


_SHEET = "NVIDIA's data sheet or architecture white paper, dense rates"
_OOM = "capacity from torch's out-of-memory messages"
CARDS = (
    _card("RTX3090-24GB", 23.69, 936, (35.6, 35.6, 71.0), 4, f"{_SHEET} (GA102); {_OOM}"),
    _card("RTX4090-24GB", 23.64, 1008, (82.6, 82.6, 165.2), 4, f"{_SHEET} (Ada); {_OOM}"),
    _card("RTX5090-32GB", 31.36, 1792, (104.8, 104.8, 209.5), 5, f"{_SHEET} (Blackwell); {_OOM}"),
    _card("L4-24GB", 22.03, 300, (30.3, 60.0, 121.0), 4, f"{_SHEET}; {_OOM}"),
    _card("L40S-48GB", 44.4, 864, (91.6, 183.0, 362.0), 4, f"{_SHEET}; {_OOM}"),
    _card("A10G-24GB", 22.06, 600, (31.2, 35.0, 70.0), 4, f"AWS's variant of NVIDIA's A10; {_OOM}"),
    _card("A6000-48GB", 47.5, 768, (38.7, 77.4, 154.8), 4, f"{_SHEET} (RTX A6000, GA102); {_OOM}"),
)
"""Cards of which nobody published what they achieve in training."""
A100_40 = replace(
    A100,
    name="A100-SXM-40GB",
    capacity_bytes=_usable_bytes(39.39),
    memory_bytes_per_s=1555e9,
    source=f"NVIDIA's A100 data sheet (40 GB); {_OOM}; otherwise as the A100 of 80 GB",
)
B200 = replace(
    GB200,
    name="B200-180GB",
    capacity_bytes=_usable_bytes(178.3),
    memory_bytes_per_s=7700e9,
    flops_per_s={kind: 0.9 * rate for kind, rate in GB200.flops_per_s.items()}
    | {"float64": 37e12, "float32": 75e12, "tfloat32": 1100e12},
    to_host_bytes_per_s=46.8e9,
    from_host_bytes_per_s=54.8e9,
    host_update_bytes_per_s=_UPDATE_SHARE * 307.2e9,
    network=replace(HGX_H100, node_bytes_per_s=720e9),
    source=f"NVIDIA's Blackwell data sheet, column HGX B200, dense; {_OOM}; host and "
    "adapters assumed as an H100's; otherwise as a GB200",
)
MI300X = replace(
    _card(
        "MI300X-192GB",
        191.98,
        5300,
        (163.4, 653.7, 1307.4),
        5,
        "AMD's MI300X data sheet; 708 of 1,307 bfloat16 tera-operations per second achieved (AMD, "
        f"Measuring Max-Achievable FLOPs, part 2); {_OOM}",
        (0.54, 0.81),
    ),
    network=replace(HGX_H100, node_bytes_per_s=310e9),
)


def _apple(name: str, memory_gb: int, memory_gb_per_s: float, tera: float) -> Device:
    return Device(
        name=name,
        capacity_bytes=int(0.75 * memory_gb * _GIB),
        flops_per_s=dict.fromkeys(("float32", "bfloat16", "float16"), 1000000000000.0 * tera),
        memory_bytes_per_s=memory_gb_per_s * 1e9,
        launch_latency_s=10e-6,
        flops_fraction=0.7,
        memory_fraction=0.8,
        block_bytes=256,
        kind="mps",
        source=f"{memory_gb} GB of unified memory, of which Metal recommends three quarters at "
        "most; bandwidth and float32 rate from Apple's press releases; shares assumed",
    )


APPLE = (
    _apple("M1-Max-64GB", 64, 400, 10.4),
    _apple("M1-Ultra-128GB", 128, 800, 21.0),
    _apple("M2-Ultra-192GB", 192, 800, 27.2),
)
H100_PCIE_4 = replace(
    H100,
    name="H100-PCIe-4-host",
    to_host_bytes_per_s=23.4e9,
    from_host_bytes_per_s=27.4e9,
    source="an H100 in a host with PCIe 4.0 ×16 (31.5 GB/s), at the shares measured over PCIe 5.0 "
    "(46.8 and 54.8 of 63 GB/s); see memopt.models.presets",
)
CPU_CORE = Device(
    name="cpu-core",
    to_host_bytes_per_s=5e9,
    flops_per_s={"float64": 25e9, "float32": 50e9, "bfloat16": 50e9, "float16": 25e9},
    memory_bytes_per_s=10e9,
    launch_latency_s=4e-6,
    source="one core of a server CPU, orders of magnitude only; memopt.measure_device() calibrates",
)

_GPUS = (V100_PCIE, P100, A100, H100, H100_PCIE_4, H200, GH200, GB200, A100_40, B200, MI300X)
PRESETS: tuple[Device, ...] = (*_GPUS, *CARDS, *APPLE, CPU_CORE)
"""Every device that memopt knows by name."""

ALIASES = {
    **dict.fromkeys(("v100", "v100-pcie"), V100_PCIE),
    "p100": P100,
    **dict.fromkeys(("a100", "a100-80", "a100-80gb"), A100),
    **dict.fromkeys(("h100", "h100-sxm", "h100-pcie5"), H100),
    "h200": H200,
    "h100-pcie4": H100_PCIE_4,
    "gh200": GH200,
    "gb200": GB200,
    **dict.fromkeys(("a100-40", "a100-40gb"), A100_40),
    "b200": B200,
    "mi300x": MI300X,
    "rtxa6000": CARDS[-1],
    **{card.name.lower().rpartition("-")[0]: card for card in (*CARDS, *APPLE)},
}
"""Short names (lower case)."""


def find_device(name: str) -> Device:
    """Return the preset of that name, whatever its case.

    Raises:
        ValueError: there is none; the message lists the known ones.
    """
    by_name = {device.name.lower(): device for device in PRESETS} | ALIASES
    key = "".join(name.lower().split())
    found = by_name.get(key) or by_name.get(key.replace("-", ""))
    if found is None:
        near = get_close_matches(key, by_name, n=4, cutoff=0.5)
        known = ", ".join(map(_shown, near or _KNOWN))
        said = f"did you mean {known}?" if near else f"memopt knows {known}"
        raise ValueError(
            f"unknown device {name!r}; {said} "
            "(`memopt device` lists all). For another one pass "
            'memopt.Device(name=..., capacity_bytes=..., flops_per_s={"bfloat16": ...}, '
            "memory_bytes_per_s=..., block_bytes=512), or memopt.measure_device() for this machine"
        )
    return found


_KNOWN = ("h100", "h200", "a100", "rtx4090", "l40s", "mi300x", "gh200", "gb200")


def _shown(name: str) -> str:
    """Write a short name in its usual spelling."""
    return name.upper().replace("PCIE", "PCIe").replace("MAX", "Max").replace("ULTRA", "Ultra")
