"""Rows of the table: operators whose names torch does not promise, and operators that eager runs as
one kernel; imports no torch."""

from __future__ import annotations

from memopt.torch_private import specimens
from memopt.torch_private.table import KNOWN, LATER, Row, rows

# Operators that eager runs as one kernel, and that torch decomposes in Python while it traces. That
# gives other bits (interpolation, shrinking), more memory, or another result (an LSTM loses the
# dropout between its layers, torch.nn.MultiLabelMarginLoss is wrong).
TAKEN_APART = (
    *(
        f"upsample_{kind}.{form}"
        for kind in (
            "nearest1d",
            "nearest2d",
            "nearest3d",
            "linear1d",
            "bilinear2d",
            "bicubic2d",
            "trilinear3d",
        )
        for form in ("default", "vec")
    ),
    *(f"_upsample_nearest_exact{n}d.{form}" for n in (1, 2, 3) for form in ("default", "vec")),
    "_upsample_bilinear2d_aa.vec",
    "_upsample_bicubic2d_aa.vec",
    "_upsample_lanczos2d_aa.vec",
    "hardshrink.default",
    "softshrink.default",
    "matmul.default",
    "multi_margin_loss.default",
    "multilabel_margin_loss_forward.default",
    *(
        f"{kind}.{form}"
        for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
        for form in ("input", "data")
    ),
)
_NEW = {"_upsample_lanczos2d_aa.vec": LATER}

_NAMED = (
    "_adaptive_avg_pool2d.default",
    "_batch_norm_with_update_functional.default",
    "_chunk_cat.default",
    "_conj.default",
    "_cudnn_attention_forward.default",
    "_efficient_attention_forward.default",
    "_efficientzerotensor.default",
    "_embedding_bag_backward.default",
    "_fft_c2c.default",
    "_fft_c2r.default",
    "_fft_r2c.default",
    "_foreach_norm.Scalar",
    "_fused_rms_norm.default",
    "_fused_rms_norm_backward.default",
    "_linalg_eigh.default",
    "_linalg_svd.default",
    "_local_scalar_dense.default",
    "_log_softmax.default",
    "_log_softmax.out",
    "_log_softmax_backward_data.default",
    "_log_softmax_backward_data.out",
    "_native_batch_norm_legit.no_stats",
    "_native_batch_norm_legit.out",
    "_native_batch_norm_legit_functional.default",
    "_neg_view.default",
    "_safe_softmax.default",
    "_scaled_dot_product_cudnn_attention.default",
    "_scaled_dot_product_efficient_attention.default",
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "_scaled_dot_product_flash_attention_for_cpu_backward.default",
    "_softmax.default",
    "_softmax.out",
    "_softmax_backward_data.default",
    "_softmax_backward_data.out",
    "_to_copy.default",
    "_trilinear.default",
    "_unsafe_view.default",
    "_upsample_bilinear2d_aa_backward.default",
)
"""Operators that memopt calls, or knows by name in graphs."""

NAMED: tuple[Row, ...] = tuple(rows("know operators in graphs", "torch.ops.aten", *_NAMED))
WHOLE: tuple[Row, ...] = tuple(
    row
    for name in TAKEN_APART
    for row in rows(
        "trace as one what eager runs as one kernel",
        "torch.ops.aten",
        name,
        versions=_NEW.get(name, KNOWN),
    )
)
COLLECTIVES: tuple[Row, ...] = tuple(
    rows(
        "know and make collectives in graphs",
        "torch.ops._c10d_functional",
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "all_reduce",
        "reduce_scatter_tensor",
        "wait_tensor",
        needs="distributed",
    )
)
OPERATORS: tuple[Row, ...] = (
    *rows("tell operators from functions", "torch._ops", "OpOverload"),
    *rows(
        "read what an operator takes, writes and returns",
        "torch._ops.OpOverload",
        "_schema",
        of=specimens.overload,
    ),
    *rows("call operators fast", "torch._ops.OpOverload", "_op", of=specimens.overload),
    *rows(
        "call operators fast",
        "torch._C",
        "_VariableFunctions",
        "_nn",
        "_linalg",
        "_fft",
        "_special",
        "TensorBase",
    ),
    *rows(
        "trace as one what eager runs as one kernel",
        "torch._ops.OpOverload",
        "_dispatch_cache",
        "py_kernels",
        of=specimens.overload,
    ),
    *NAMED,
    *WHOLE,
    *COLLECTIVES,
)
