"""Every kind of PEFT adapter trains as without memopt, bit for bit: whole, or by parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

import memopt
from memopt.errors import CaptureError

QV: Any = ["q_proj", "v_proj"]
CAUSAL: Any = {"task_type": "CAUSAL_LM"}
WHOLE: dict[str, Callable[[], Any]] = {
    "adalora": lambda: peft.AdaLoraConfig(
        init_r=6, target_r=4, total_step=6, tinit=1, tfinal=1, deltaT=1, target_modules=QV, **CAUSAL
    ),
    "adaption": lambda: peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1, **CAUSAL),
    "c3a": lambda: peft.C3AConfig(block_size=16, target_modules=QV),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=QV, use_dora=True, lora_dropout=0.1),
    "embedding": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]),
    "fourier": lambda: peft.FourierFTConfig(n_frequency=50, target_modules=QV),
    "hra": lambda: peft.HRAConfig(r=4, target_modules=QV),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **CAUSAL
    ),
    "miss": lambda: peft.MissConfig(r=4, target_modules=QV),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"], **CAUSAL),
    "oft": lambda: peft.OFTConfig(oft_block_size=8, r=0, target_modules=QV),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=5, **CAUSAL),
    "p-tuning": lambda: peft.PromptEncoderConfig(
        num_virtual_tokens=5, encoder_hidden_size=32, **CAUSAL
    ),
    "randlora": lambda: peft.RandLoraConfig(r=8, target_modules=QV),
    "saved": lambda: peft.LoraConfig(
        r=4, target_modules="all-linear", use_rslora=True, modules_to_save=["lm_head"], **CAUSAL
    ),
    "tokens": lambda: peft.LoraConfig(r=4, target_modules=QV, trainable_token_indices=[1, 2]),
    "vblora": lambda: peft.VBLoRAConfig(r=4, num_vectors=16, vector_length=8, target_modules=QV),
    "vera": lambda: peft.VeraConfig(r=8, target_modules=QV),
}
BY_PARTS: dict[str, Callable[[], Any]] = {
    "boft": lambda: peft.BOFTConfig(boft_block_size=8, target_modules=QV),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=QV),
    "lokr": lambda: peft.LoKrConfig(r=4, target_modules=QV),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=5, **CAUSAL),
    "shira": lambda: peft.ShiraConfig(r=4, target_modules=QV),
}
QUICK = ("dora",)
BATCHES = torch.randint(1, 100, (4, 2, 24), generator=torch.Generator().manual_seed(0))


def adapted(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=1,
    )
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), make()).train()


def trained(make: Callable[[], Any], **asked: Any) -> tuple[list[Tensor], Any]:
    model = adapted(make)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    if asked:
        memopt.wrap(model, optimizer=optimizer, improve=False, progress=False, **asked)
    torch.manual_seed(7)
    losses = []
    for step, ids in enumerate(BATCHES):
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        loss.backward()
        optimizer.step()
        if hasattr(model.base_model, "update_and_allocate"):  # ranks, of AdaLoRA
            model.base_model.update_and_allocate(step)
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses, model


def check(make: Callable[[], Any], **asked: Any) -> None:
    wanted, eager = trained(make)
    found, model = trained(make, **asked)
    assert all(map(torch.equal, found, wanted))
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert model.memopt.calls.planned >= len(BATCHES)
    assert model.memopt.calls.original == 0


def marked(names: dict[str, Any]) -> list[Any]:
    return [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name)
        for name in names
    ]


@pytest.mark.parametrize("name", marked(WHOLE))
def test_whole(name: str) -> None:
    check(WHOLE[name], budget="min", strategy="rotor")


@pytest.mark.parametrize("name", marked(BY_PARTS))
def test_what_no_graph_holds_by_parts(name: str) -> None:
    """As the refusal of the whole model advises."""
    with pytest.raises(CaptureError, match=r'parts="auto"'):
        trained(BY_PARTS[name], budget="min", strategy="rotor")
    check(BY_PARTS[name], budget="200MiB", strategy="rotor", parts="auto")
