"""Makes a model's stand-in of fake CPU tensors: shapes and dtypes without storage.

Models built on `torch.device("meta")`, on the CPU and on a GPU are treated alike; no parameter is
copied and nothing is computed. Fake tensors claim to be on the CPU because a torch without CUDA
cannot trace fake CUDA tensors, and on meta tensors attention decomposes into its parts.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from memopt.step.inputs import Call
from memopt.step.shards import local_part, with_local_part
from memopt.torch_private import pytree
from memopt.torch_private.access import patched
from memopt.torch_private.aot import FakeTensorMode
from memopt.torch_private.dynamo import captured_around


class Fakes:
    """Fake stand-ins under one fake mode; a tensor's stand-in is always the same."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def tensor(self, real: torch.Tensor) -> torch.Tensor:
        """Return a tensor's stand-in, whatever its device: same shape, strides, dtype and
        requires_grad. A DTensor's stand-in has a fake shard."""
        if id(real) in self._known:
            return self._known[id(real)][1]
        if local_part(real) is not real:
            fake = with_local_part(real, self.tensor)
        else:
            with self.mode, torch.no_grad():
                fake = torch.empty_strided(
                    tuple(real.shape), tuple(real.stride()), dtype=real.dtype, device="cpu"
                )
        if isinstance(real, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=real.requires_grad)
        elif real.requires_grad:
            fake.requires_grad_()
        # The real tensor is kept so that its id is not reused.
        self._known[id(real)] = (real, fake)
        return fake

    def model(self, real: nn.Module) -> nn.Module:
        """Copy a module with fake parameters, buffers and plain tensor attributes."""
        tensors: list[torch.Tensor] = [*real.parameters(), *real.buffers()]
        for module in real.modules():
            tensors += [v for v in vars(module).values() if isinstance(v, torch.Tensor)]
        # deepcopy takes an object's entry in its memo instead of copying the object.
        memo: dict[int, Any] = {id(tensor): self.tensor(tensor) for tensor in tensors}
        return copy.deepcopy(real, memo)

    def call(self, real: Call) -> Call:
        """Return the call with fake tensors."""
        return real.with_tensors(self.tensor)

    def value(self, real: Any) -> Any:
        """Return a nest of values with its tensors fake."""
        return pytree.tree_map_only(torch.Tensor, self.tensor, real)


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Trace attention with dropout as one operator, as CUDA runs it.

    The CPU has no fused kernel with dropout and would trace the product, softmax and dropout of
    S × S scores. CUDA's kernels draw their dropout inside and save nothing for it but two numbers,
    so the operator without dropout has their memory.
    """
    original = functional.scaled_dot_product_attention

    def fused(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        drawn_inside = 0.0 if captured_around() else dropout_p  # not so in another thread
        return original(query, key, value, attn_mask, drawn_inside, *args, **kwargs)

    with patched("torch.nn.functional.scaled_dot_product_attention", fused):
        yield
