"""Planning in a call that `torch.compile` has compiled."""

from __future__ import annotations

from memopt.torch_private.dynamo import compiled_code_kept as compiled_code_kept
