"""The convolution algorithms that plans choose from, frozen, each with the source of its figures.

MONeT chose among eight forward and six backward algorithms of cuDNN, with time and workspace
measured on a P100 (Figure 7). Here workspaces follow from what each algorithm holds, and no time
below the library's own is claimed where none was measured.
"""

from __future__ import annotations

ALGORITHMS: tuple[tuple[str, str, str, str, str], ...] = (
    (
        "library default",
        "forward, both gradients",
        "0 in single precision; in half precision the channels-last copies",
        "roofline of 2 operations per multiply-add at 80% of the peak",
        "`profiler/estimate.py`, `profiler/workspace.py`",
    ),
    (
        "input gradient, weight gradient",
        "each gradient as a run of its own; the input gradient reads no input",
        "0",
        "half of the default backward's each",
        "`implementations/convolution.py`; MONeT appendix C",
    ),
    (
        "split 2, split 8",
        "forward; over its input where it can be",
        "a half, an eighth of the result",
        "the default's, and writing and reading the result once more",
        "`implementations/convolution.py`",
    ),
    (
        "input gradient split, weight gradient split",
        "input gradient, over the gradient it reads where the shapes are alike; weight gradient",
        "an eighth of the result; the weight",
        "half of the default backward's, and writing and reading the result once more",
        "`implementations/convolution.py`",
    ),
    (
        "weight gradient again",
        "weight gradient; its input made again from the convolution before it",
        "an eighth of the input, and the weight",
        "half of the default backward's, and those of the operators run again",
        "`implementations/convolution_neighbours.py`",
    ),
    (
        "input gradient parts",
        "input gradient of a concatenation, slice by slice",
        "an eighth of the result",
        "half of the default backward's, and writing and reading the result once more",
        "`implementations/convolution_neighbours.py`",
    ),
    (
        "gemm",
        "forward, input gradient, weight gradient",
        "C·kh·kw·OH·OW of one image",
        "the default's, and writing and reading every image's columns",
        "`implementations/convolution_products.py`",
    ),
    (
        "fft",
        "forward, input gradient, weight gradient; stride 1",
        "twice the spectra: (N·C + O·C + N·O)·H'·(W'/2 + 1) complex numbers",
        "the default's, and moving the spectra four times",
        "`implementations/convolution_products.py`",
    ),
    (
        "native",
        "forward, backward; CPU only",
        "measured",
        "measured",
        "`implementations/convolution.py`: ATen's kernels in place of oneDNN's",
    ),
    (
        "benchmarked, deterministic",
        "forward, backward; CUDA only",
        "measured",
        "measured; no GPU was there",
        "`implementations/convolution.py`: cuDNN's flags",
    ),
)
"""(name, of what, workspace in estimates, time in estimates, source)."""


def algorithms_table() -> list[str]:
    """A section of the results page."""
    lines = [
        "## Convolution algorithms",
        "",
        "No row was measured on a GPU. On the CPU all are measured when a model is profiled.",
        "",
        "| algorithm | of | workspace in estimates | time in estimates | source |",
        "|---|---|---|---|---|",
    ]
    return lines + [f"| {' | '.join(row)} |" for row in ALGORITHMS]
