"""While a thread captures a model, others compute as ever: what the capture changes in torch and
transformers is the process's."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.utils import output_capturing

import memopt
from memopt.capture.as_eager.masks import masks_nothing
from memopt.capture.as_eager.recorded_outputs import hooks_set
from memopt.capture.capture import capture
from memopt.step.inputs import to_call
from memopt.torch_private.dynamo import comptime
from tests.zoo import torchvision_shim  # noqa: F401  # before what transformers loads

WORDS = torch.arange(12).view(2, 6)
PADDED = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])


def llama(kind: type[nn.Module] = transformers.LlamaForCausalLM) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=16,
    )
    return kind(config)


def stepped() -> Tensor:
    """A weight after steps of Adam, which computes otherwise where torch says that it compiles."""
    weight = nn.Parameter(torch.linspace(-1, 1, 32))
    optimizer = torch.optim.Adam([weight], 0.01)
    for _ in range(8):
        weight.square().sum().backward()
        optimizer.step()
    return weight.detach()


def masked() -> Tensor:
    with torch.no_grad():
        logits: Tensor = llama()(WORDS, attention_mask=PADDED, use_cache=False).logits
    return logits


def packed() -> Tensor:
    with torch.no_grad():
        logits: Tensor = llama()(WORDS, position_ids=PACKED, use_cache=False).logits
    return logits


def dropped() -> Tensor:
    """Attention of which dropout leaves nothing."""
    one = torch.ones(1, 1, 4, 4)
    return functional.scaled_dot_product_attention(one, one, one, dropout_p=1.0)


@pytest.mark.parametrize("compute", [stepped, masked, packed, dropped])
def test_another_thread_computes_as_ever_while_a_model_is_traced(
    compute: Callable[[], Tensor],
) -> None:
    expected = compute()
    meanwhile: queue.SimpleQueue[Tensor] = queue.SimpleQueue()  # planning puts back what a list has

    def computed_meanwhile(_context: object) -> None:
        thread = threading.Thread(target=lambda: meanwhile.put(compute()))
        thread.start()
        thread.join()

    while_traced = comptime()

    class Traced(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            while_traced(computed_meanwhile)
            return super().forward(*args, **kwargs)

    mask = torch.ones_like(WORDS)
    inputs = {"input_ids": WORDS, "labels": WORDS, "attention_mask": mask, "use_cache": False}
    if compute is dropped:
        memopt.profile(llama(Traced), inputs, mode="estimate", device="h100")
    else:
        call = to_call(inputs)
        capture(llama(Traced), replace(call, whole_masks=masks_nothing(call)))
    assert not meanwhile.empty()
    while not meanwhile.empty():
        assert torch.equal(meanwhile.get(), expected)


def test_another_thread_records_outputs_while_a_model_gets_its_hooks() -> None:
    def recorded() -> tuple[Tensor, ...]:
        with torch.no_grad():
            found = llama()(WORDS, output_hidden_states=True, use_cache=False).hidden_states
        return tuple(found)

    expected = recorded()
    meanwhile: queue.SimpleQueue[tuple[Tensor, ...]] = queue.SimpleQueue()

    class Asking(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            thread = threading.Thread(target=lambda: meanwhile.put(recorded()))
            thread.start()
            thread.join()
            return super().forward(*args, **kwargs)

    behind_a_lock = RuntimeError()
    behind_a_lock.real_stack = [SimpleNamespace(filename=output_capturing.__file__)]  # type: ignore[attr-defined]
    call = to_call({"input_ids": WORDS, "output_hidden_states": True, "use_cache": False})
    assert hooks_set(llama(Asking), call, behind_a_lock)
    found = meanwhile.get()
    assert len(found) == len(expected) > 1
    assert all(map(torch.equal, found, expected))
