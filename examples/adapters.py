# SPDX-License-Identifier: Apache-2.0
"""Two LoRA classifiers, of 2 and 5 labels, over one backbone; each row of a batch chooses its own.

pip install 'headswap[peft]' && python examples/adapters.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headswap

LABELS = {"sentiment": 2, "topic": 5}
IDS = torch.randint(3, 99, (4, 7), generator=torch.Generator().manual_seed(0))
CHOSEN = ["sentiment", "topic", "topic", "sentiment"]


def trained(causal: Any, name: str, folder: Path) -> Path:
    """A LoRA adapter with a head, as PEFT saves it (random here, trained by you)."""
    config = peft.LoraConfig(task_type="SEQ_CLS", init_lora_weights=False)
    model = peft.get_peft_model(headswap.as_seq_cls_model(causal, num_labels=LABELS[name]), config)
    model.save_pretrained(folder / name)
    return folder / name


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    causal = LlamaForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        # Each has its head and its LoRA layers; the backbone's tensors are the same memory.
        models = {
            name: peft.PeftModel.from_pretrained(
                headswap.as_seq_cls_model(causal, num_labels=count),
                str(trained(causal, name, Path(folder))),
            ).eval()
            for name, count in LABELS.items()
        }
    mask = torch.ones_like(IDS)
    logits: list[Any] = [None] * len(CHOSEN)
    with torch.no_grad():
        for name, model in models.items():
            rows = [row for row, chosen in enumerate(CHOSEN) if chosen == name]
            found = model(input_ids=IDS[rows], attention_mask=mask[rows]).logits
            for row, one in zip(rows, found, strict=True):
                logits[row] = one
    for chosen, one in zip(CHOSEN, logits, strict=True):
        print(chosen, [round(float(value), 3) for value in one])
    shared = {p.data_ptr() for p in causal.model.parameters()}
    if not all(shared <= {p.data_ptr() for p in m.parameters()} for m in models.values()):
        raise SystemExit("the backbone was copied")
    print("one backbone:", len(shared), "tensors in common")


if __name__ == "__main__":
    main()
