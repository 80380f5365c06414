# SPDX-License-Identifier: Apache-2.0
"""A classifier in planned shapes, and its graphs against the card's rules.

    python examples/executor.py

The model is made here and random; a path to a checkpoint goes in its place (`headswap.load`).
"""

from __future__ import annotations

import torch
import transformers

import headswap
from headswap.spyre import Executor

torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=100, hidden_size=256, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1,
)  # fmt: skip
model = headswap.as_seq_cls_model(transformers.LlamaForCausalLM(config), num_labels=2).eval()
rows = [[5, 6, 7], [8] * 50, [9, 10] * 40]

with torch.no_grad():
    own = torch.cat([model(input_ids=torch.tensor([row])).logits for row in rows])

packs = Executor(model)
planned = Executor(model, backend="checked", rules="record", shapes=[(2, 64), (1, 128)]).warmup()
for name, executor in (("packs", packs), ("planned shapes", planned)):
    gap = float((executor.logits(rows) - own).abs().max())
    if gap > 1e-5:
        raise SystemExit("the numbers differ")
    print(f"{name}: largest difference from each row alone {gap:.1e}")

report = planned.report()
print(f"{report['compiles']} graphs for {report['shapes']}, {report['waste']:.0%} padding")
print("rules:", sorted({finding["rule"] for finding in report["rules"]["findings"]}))
