# SPDX-License-Identifier: Apache-2.0
"""Peers with engines of their own: OpenVINO, ONNX Runtime, vLLM for CPU.

    python -m race.engines openvino|onnx FOLDER    converts, once; a run reads the result

Converting happens in a process of its own, so that a run's start and memory are those of the engine
alone, as where somebody deploys it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from race.ways import Batches, Logits, Spec, Text, Way

FILES = {"openvino": "openvino/model.xml", "onnx": "onnx/model.onnx"}


class Converted(Batches):
    """An engine that reads a converted file."""

    engine = ""
    batches = (1, 8, 16)
    returns = "np"

    @classmethod
    def unprepared(cls, spec: Spec) -> bool:
        return not Path(spec.folder, FILES[cls.engine]).exists()

    def file(self, spec: Spec) -> str:
        """The converted model, made the first time."""
        if self.unprepared(spec):
            command = [sys.executable, "-m", "race.engines", self.engine, spec.folder]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            sys.stderr.write(done.stdout + done.stderr)
            if done.returncode:
                raise RuntimeError(f"conversion failed: {done.stderr.strip()[-400:]}")
        return str(Path(spec.folder, FILES[self.engine]))


class OpenVINO(Converted):
    """OpenVINO's own converter, and its CPU plugin at the asked precision."""

    engine = "openvino"

    def load(self, spec: Spec) -> None:
        import openvino

        self.take_tokenizer(spec)
        core = openvino.Core()
        hint = {"float32": "f32", "bfloat16": "bf16"}[spec.dtype]
        self._model = core.compile_model(
            self.file(spec), "CPU",
            {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": spec.threads,
             "PERFORMANCE_HINT": "LATENCY"},
        )  # fmt: skip
        self._names = {name for port in self._model.inputs for name in port.names}
        self._request = self._model.create_infer_request()

    def forward(self, inputs: dict[str, Any]) -> Logits:
        given = {name: value for name, value in inputs.items() if name in self._names}
        found: Logits = self._request.infer(given)[0].tolist()
        return found

    def settings(self) -> dict[str, Any]:
        used = self._model.get_property("INFERENCE_PRECISION_HINT").to_string()
        return {"precision": used}


class ONNX(Converted):
    """ONNX Runtime on torch's export; fp32 only on a CPU."""

    engine = "onnx"
    dtypes = ("float32",)

    def load(self, spec: Spec) -> None:
        import onnxruntime

        self.take_tokenizer(spec)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = spec.threads
        self._session = onnxruntime.InferenceSession(
            self.file(spec), options, providers=["CPUExecutionProvider"]
        )
        self._names = {each.name for each in self._session.get_inputs()}

    def forward(self, inputs: dict[str, Any]) -> Logits:
        given = {name: value for name, value in inputs.items() if name in self._names}
        found: Logits = self._session.run(None, given)[0].tolist()
        return found


class VLLM(Way):
    """vLLM's CPU build. Its prefix cache is on for causal models, as it comes."""

    eager = False

    @classmethod
    def _cache(cls, spec: Spec) -> Path:
        """Where what it compiles is kept, by everything that changes it."""
        return Path(spec.folder, f"vllm-{spec.dtype}-{spec.threads}-{spec.longest}-{cls.eager}")

    @classmethod
    def unprepared(cls, spec: Spec) -> bool:
        return not cls._cache(spec).exists()

    def load(self, spec: Spec) -> None:
        cores = sorted(os.sched_getaffinity(0))[-spec.threads :]
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
            VLLM_CACHE_ROOT=str(self._cache(spec)), VLLM_LOGGING_LEVEL="WARNING",
            VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
        )  # fmt: skip
        from vllm import LLM, PoolingParams

        self._model = LLM(
            spec.folder, runner="pooling", dtype=spec.dtype, max_model_len=spec.longest,
            enable_prefix_caching=spec.causal, enforce_eager=self.eager,
        )  # fmt: skip
        self._raw = PoolingParams(use_activation=False)
        self._cut = {"truncation": True, "max_length": spec.longest}

    def logits(self, texts: Sequence[Text]) -> Logits:
        more: Any = {"pooling_params": self._raw, "use_tqdm": False,
                     "tokenization_kwargs": self._cut}  # fmt: skip
        if isinstance(texts[0], str):
            return [list(each.outputs.probs) for each in self._model.classify(list(texts), **more)]
        firsts, seconds = zip(*texts, strict=True)
        found = self._model.score(list(firsts), list(seconds), **more)
        return [[each.outputs.score] for each in found]

    def forget(self) -> None:
        self._model.reset_prefix_cache()

    def settings(self) -> dict[str, Any]:
        return {"cores": os.environ["VLLM_CPU_OMP_THREADS_BIND"], "eager": self.eager}


class VLLMEager(VLLM):
    """The same without compiling."""

    eager = True


def _traced(folder: str) -> tuple[Any, dict[str, Any]]:
    """A module that gives logits alone, and inputs to trace it with."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    class OnlyLogits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModelForSequenceClassification.from_pretrained(
                folder, dtype=torch.float32
            ).eval()
            if hasattr(self.model.config, "use_cache"):
                self.model.config.use_cache = False

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None) -> Any:
            more = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
            return self.model(input_ids=input_ids, attention_mask=attention_mask, **more).logits

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "right"
    texts = ["the first text is the longer one of two texts", "the second text"]
    return OnlyLogits(), dict(tokenizer(texts, padding=True, return_tensors="pt"))


def to_openvino(folder: str, file: Path) -> None:
    import openvino

    model, inputs = _traced(folder)
    openvino.save_model(
        openvino.convert_model(model, example_input=inputs), file, compress_to_fp16=False
    )


def to_onnx(folder: str, file: Path) -> None:
    import torch

    model, inputs = _traced(folder)
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    torch.onnx.export(
        model, (), str(file), kwargs=inputs, dynamo=True, external_data=True,
        dynamic_shapes=dict.fromkeys(inputs, free),
    )  # fmt: skip


def convert(engine: str, folder: str) -> None:
    """Write the converted model beside, and rename it into place."""
    target = Path(folder, FILES[engine])
    beside = target.parent.with_name(f".{target.parent.name}-{os.getpid()}")
    beside.mkdir(parents=True)
    {"openvino": to_openvino, "onnx": to_onnx}[engine](folder, beside / target.name)
    beside.rename(target.parent)


if __name__ == "__main__":
    convert(*sys.argv[1:])
