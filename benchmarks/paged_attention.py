# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding of SmolLM2 over paged attention beside transformers' own cache.

    python benchmarks/paged_attention.py [QUESTIONS.jsonl]

Each line of the file holds a "question" (GSM8K's test set is meant; without a file questions are
made). First the texts are compared, token for token in fp32; then the ways take turns, at batch 1
and 16, and the medians of their tokens a second are printed with the ratio to transformers' own.

    pip install 'headswap[demo]'
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from headswap.cli.demo import unpack
from headswap.cli.packages import SMOLLM2, locate
from headswap.spyre import Executor

WAYS = ("native", "sdpa", "reference")
Ids = list[list[int]]


NAMES = ("Ana", "Ben", "Chen", "Dora", "Emil")
THINGS = ("apples", "books", "coins", "stamps", "shells", "pens", "cards", "stones")


def prompts_of(file: Path | None, tokenizer: Any, count: int) -> Ids:
    """Token ids of the first `count` questions of `file`, or of made ones of mixed lengths."""
    if file is not None:
        lines = file.read_text(encoding="utf-8").splitlines()[:count]
        questions = [json.loads(line)["question"] for line in lines]
    else:
        questions = [_question(i) for i in range(count)]
    return [tokenizer(question).input_ids for question in questions]


def _question(i: int) -> str:
    name, thing = NAMES[i % len(NAMES)], THINGS[i % len(THINGS)]
    days = " ".join(f"On day {day} {name} gives {day + 1} of them to a friend."
                    for day in range(1, 2 + i % 7))  # fmt: skip
    return f"{name} has {30 + 3 * i} {thing}. {days} How many {thing} does {name} have now?"


def theirs(model: Any, prompts: Sequence[list[int]], new: int, end: int | None) -> Ids:
    """transformers' greedy ids behind each prompt, in one batch padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    more = {} if end is None else {"eos_token_id": end}
    found = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False,
                           pad_token_id=0, **more)  # fmt: skip
    return [row[width:].tolist() for row in found]


def compare(model: Any, ways: dict[str, Executor], prompts: Ids, new: int) -> None:
    """Print how many texts are the same, token for token, each prompt alone at transformers'."""
    end = model.generation_config.eos_token_id
    wanted = [theirs(model, [p], new, end)[0] for p in prompts]
    for name in ("native", "sdpa"):
        found = ways[name].generate(prompts, new, eos_token_id=end)
        same = sum(one == two for one, two in zip(found, wanted, strict=True))
        print(f"{name}: {same} of {len(prompts)} texts equal transformers' greedy text", flush=True)


def race(runs: dict[str, Callable[[], Ids]], rounds: int) -> dict[str, float]:
    """Tokens a second of each way, the median over `rounds` of taking turns."""
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            tokens = sum(map(len, run()))
            spent[name].append(tokens / (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("questions", type=Path, nargs="?")
    parser.add_argument("--folder", type=Path, default=Path("smollm2-plain"))
    parser.add_argument("--count", type=int, default=40, help="questions that are compared")
    parser.add_argument("--new", type=int, default=64, help="tokens a text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    if not (options.folder / "config.json").exists():
        unpack(locate(SMOLLM2), options.folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.folder).float().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.folder)
    prompts = prompts_of(options.questions, tokenizer, options.count)
    ways = {name: Executor(model, backend="eager", attention=name, block_size=64) for name in WAYS}
    compare(model, ways, prompts, options.new)
    model.generation_config.eos_token_id = None  # every text has its full length from here on
    print(f"tokens a second, {options.threads} thread(s), median of {options.rounds}")
    for size in (1, 16):
        given = prompts[:size]

        def ours(name: str, given: Ids = given) -> Callable[[], Ids]:
            return lambda: ways[name].generate(given, options.new, eos_token_id=())

        runs = {"transformers": lambda given=given: theirs(model, given, options.new, None)}
        runs |= {name: ours(name) for name in WAYS}
        found = race(runs, options.rounds)
        own = found["transformers"]
        said = [f"{name} {value:.1f} ({value / own:.2f}x)" for name, value in found.items()]
        print(f"batch {size}: {', '.join(said)}", flush=True)


if __name__ == "__main__":
    main()
