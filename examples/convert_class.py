# SPDX-License-Identifier: Apache-2.0
"""Turn a causal class into a classifier and train it for a few steps, on a tiny random model."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headswap

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, pad_token_id=0,
)  # fmt: skip
model = headswap.as_seq_cls_model(LlamaForCausalLM(config), id2label=["short", "long"])
print(type(model).__name__, "with an untrained head:", model.untrained_head)

ids = torch.tensor([[0, 0, 0, 7, 8], [3, 4, 5, 6, 7]])  # the first text is padded on the left
mask = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model.train()
for _ in range(30):
    loss = model(input_ids=ids, attention_mask=mask, labels=torch.tensor([0, 1])).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
found = model(input_ids=ids, attention_mask=mask).logits.argmax(-1).tolist()
print("loss", round(float(loss.detach()), 3), "labels", [model.config.id2label[i] for i in found])
if found != [0, 1]:
    raise SystemExit("the classifier did not learn two texts")
