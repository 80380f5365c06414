# SPDX-License-Identifier: Apache-2.0
"""Greedy text of a real model over the paged cache; the package comes with the demo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from headswap.cli.cache import cache_folder
from headswap.cli.demo import plain_smollm2
from headswap.cli.packages import SMOLLM2, locate
from headswap.registry.errors import HeadswapError
from headswap.spyre import Executor

QUESTIONS = (
    "A baker fills 7 trays with 12 rolls each and sells 50 rolls. How many rolls are left?",
    "Tom reads 15 pages on Monday and twice as many on Tuesday. How many pages did he read?",
    "What is the capital of France, and which river runs through it?",
    "Write one sentence about the sea.",
)
NEW = 24


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    try:
        gguf = locate(SMOLLM2)
    except HeadswapError as error:
        pytest.skip(str(error))
    folder = plain_smollm2(gguf, cache_folder(None))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("attention", ["native", "sdpa"])
def test_smollm2_writes_what_it_writes_over_transformers_own_cache(
    smollm2: tuple[Any, Any], attention: str
) -> None:
    model, tokenizer = smollm2
    prompts = [tokenizer(question).input_ids for question in QUESTIONS]
    wanted = [
        model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p)).long(),
                       max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0, len(p):].tolist()
        for p in prompts
    ]  # fmt: skip
    executor = Executor(model, backend="eager", attention=attention, block_size=64)
    end = model.generation_config.eos_token_id
    assert executor.generate(prompts, NEW, eos_token_id=end) == wanted
