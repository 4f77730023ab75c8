"""TRL's SFTTrainer, as it is, under a budget: a small Llama learns to complete prompts.

pip install trl
python -m examples.train_trl
"""

from __future__ import annotations

import random
import tempfile
from typing import Any

from tests.zoo import torchvision_shim  # isort: skip  # noqa: F401  # beside a CPU torch

import datasets
import tokenizers
import torch
import transformers
import trl

from memopt.integrations.hugging_face import MemoptCallback

WORDS = 60


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of the words w0 to w59."""
    special = ("<pad>", "<eos>", "<unk>", "<bos>")
    words = {word: i for i, word in enumerate((*special, *(f"w{i}" for i in range(WORDS))))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "bos_token": "<bos>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def llama(kind: Any = transformers.LlamaForCausalLM) -> Any:
    """A small model of its words, with new weights."""
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WORDS + 4,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=3,
        num_labels=1,
    )
    return kind(config)


def texts(words: int, seed: int = 0) -> list[str]:
    """Texts of one length: each further length would be planned for, too."""
    draw = random.Random(seed)
    return [" ".join(f"w{draw.randrange(WORDS)}" for _ in range(words)) for _ in range(40)]


def main(steps: int = 20) -> MemoptCallback:
    """Train; the callback, which says how the steps ran."""
    transformers.set_seed(0)
    memopt = MemoptCallback(0.95)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.SFTTrainer(
            model=llama(),
            args=trl.SFTConfig(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=4,
                logging_steps=1,
                report_to="none",
                use_cpu=not torch.cuda.is_available(),
            ),
            train_dataset=datasets.Dataset.from_dict({"text": texts(24)}),
            processing_class=tokenizer(),
            callbacks=[memopt],
        )
        trainer.train()
    print(memopt.calls, memopt.plans, sep="\n")
    return memopt


if __name__ == "__main__":
    main()
