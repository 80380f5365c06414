# SPDX-License-Identifier: Apache-2.0
"""A causal checkpoint becomes a classifier with no training: two tokens are its labels."""

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, Qwen2Config, Qwen2ForCausalLM

import headswap

torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, tie_word_embeddings=False,
)  # fmt: skip
NO, YES = 41, 57

with tempfile.TemporaryDirectory() as folder:
    source, target = Path(folder, "causal"), Path(folder, "classifier")
    lm = Qwen2ForCausalLM(config).eval()
    lm.save_pretrained(source)

    print(headswap.plan(source, label_tokens=[NO, YES], method="difference"))
    report = headswap.convert_checkpoint(source, target, label_tokens=[NO, YES],
                                         method="difference")  # fmt: skip
    print(report)

    ids = torch.tensor([[5, 6, 7]])
    tokens = lm(ids).logits[0, -1]
    stock = AutoModelForSequenceClassification.from_pretrained(target)
    ours, theirs = headswap.load(target)(ids).logits.item(), stock(ids).logits.item()
    wanted = (tokens[YES] - tokens[NO]).item()
    print(f"yes - no: {wanted:.6f}; headswap {ours:.6f}; stock transformers {theirs:.6f}")
    if max(abs(ours - wanted), abs(theirs - wanted)) > 1e-5:
        raise SystemExit("the classifier differs from the model's own token logits")
