"""Keeps Dynamo's compiled code while memopt captures inside a call of it."""

from __future__ import annotations

from memopt.torch_private.dynamo import compiled_code_kept as compiled_code_kept
