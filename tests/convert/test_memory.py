# SPDX-License-Identifier: Apache-2.0
"""Conversions that copy: the same result as over a model, in the memory of one shard."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import alone, rows, tiny

import headswap

SEQ = "AutoModelForSequenceClassification"
CAUSAL = "AutoModelForCausalLM"
LM = {"label_tokens": [7, 41]}


def state(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("model_type", "auto", "options"), [
    ("llama", CAUSAL, LM), ("llama", SEQ, {}), ("gpt2", CAUSAL, {**LM, "method": "difference"}),
    ("qwen3", CAUSAL, LM), ("granite", CAUSAL, LM), ("bert", SEQ, {}), ("roberta", SEQ, {}),
])  # fmt: skip
def test_a_copy_equals_what_the_model_saves(
    tmp_path: Path, monkeypatch: Any, model_type: str, auto: str, options: Any, dtype: Any
) -> None:
    source = tmp_path / "source"
    tiny(model_type, auto).to(dtype).save_pretrained(source, max_shard_size="30KB")
    copied = headswap.convert_checkpoint(source, tmp_path / "copied", **options)
    monkeypatch.setattr("headswap.convert.write.obstacle", lambda *_: "the test says so")
    saved = headswap.convert_checkpoint(source, tmp_path / "saved", **options)
    assert not [note for note in copied.notes if "whole model" in note]
    assert "the whole model was loaded: the test says so" in saved.notes
    found, wanted = state(tmp_path / "copied"), state(tmp_path / "saved")
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in wanted.items()}
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    configs = [json.loads((tmp_path / f / "config.json").read_text()) for f in ("copied", "saved")]
    assert configs[0] == configs[1]
    same = (copied.used, copied.derived, copied.dropped, copied.architecture, copied.stock)
    assert same == (saved.used, saved.derived, saved.dropped, saved.architecture, saved.stock)
    torch.testing.assert_close(
        alone(headswap.load(tmp_path / "copied"), rows()),
        alone(headswap.load(source, **options), rows()), atol=1e-5, rtol=0,
    )  # fmt: skip


def test_a_copy_keeps_the_files_and_their_index(tmp_path: Path) -> None:
    tiny("llama", tie_word_embeddings=False).save_pretrained(tmp_path / "in", max_shard_size="30KB")
    headswap.convert_checkpoint(tmp_path / "in", tmp_path / "out", **LM)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    tensors = state(tmp_path / "out")
    assert index["weight_map"].keys() == tensors.keys()
    assert set(index["weight_map"].values()) == {
        f.name for f in (tmp_path / "out").glob("*.safe*s")
    }
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert "lm_head.weight" not in tensors


def test_a_tied_model_takes_its_rows_from_the_embedding(tmp_path: Path) -> None:
    source = tiny("llama", tie_word_embeddings=True)
    source.save_pretrained(tmp_path / "in")
    report = headswap.convert_checkpoint(tmp_path / "in", tmp_path / "out", **LM)
    assert not report.notes
    wanted = source.get_input_embeddings().weight[[7, 41]]
    assert torch.equal(state(tmp_path / "out")["score.weight"], wanted)


def test_what_a_copy_cannot_do_goes_over_the_model_and_says_why(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "in")
    report = headswap.convert_checkpoint(
        tmp_path / "in", tmp_path / "out", dtype=torch.bfloat16, **LM
    )
    assert "the whole model was loaded: its weights become bfloat16" in report.notes


def test_a_copy_with_another_head_is_removed(tmp_path: Path, monkeypatch: Any) -> None:
    def corrupt(_: Any, folder: Path) -> None:
        (file,) = folder.glob("*.safetensors")
        tensors = load_file(file)
        tensors["score.weight"][0] += 1
        save_file(tensors, file, metadata={"format": "pt"})

    tiny("llama").save_pretrained(tmp_path / "in")
    monkeypatch.setattr("headswap.convert.write._copy_tokenizer", corrupt)
    with pytest.raises(headswap.ConversionError, match="differ"):
        headswap.convert_checkpoint(tmp_path / "in", tmp_path / "out", **LM)
    assert not (tmp_path / "out").exists()


MEASURE = """
import re, sys, torch, transformers
torch.set_num_threads(1)
from transformers.models.llama import modeling_llama
import headswap, accelerate
from headswap.convert import convert_checkpoint
# Not getrusage: a process takes over the peak of the one that started it.
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024
before = peak()
report = convert_checkpoint(sys.argv[1], sys.argv[2], label_tokens=[7, 41])
print(before, peak(), *report.notes, sep="|")
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_gigabyte_is_converted_in_the_memory_of_one_shard(tmp_path: Path) -> None:
    """Peak resident memory over that of a process which has imported torch and transformers; mapped
    pages count as resident, so that a mapped file would show."""
    big = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 14,
           "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 16000}  # fmt: skip
    try:
        model = tiny("llama", tie_word_embeddings=False, **big)
        model.save_pretrained(tmp_path / "in", max_shard_size="250MB")
        del model
        sizes = [file.stat().st_size for file in (tmp_path / "in").glob("*.safetensors")]
        assert sum(sizes) > 10**9
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(tmp_path / "in"), str(tmp_path / "out")],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        before, peak, *notes = done.stdout.strip().splitlines()[-1].split("|")
        assert not [note for note in notes if "whole model" in note]
        assert int(peak) - int(before) < max(sizes) / 2**20 + 300
        print(f"{int(peak) - int(before)} MiB over {before} MiB; shard {max(sizes) >> 20} MiB")
    finally:
        shutil.rmtree(tmp_path / "in", ignore_errors=True)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
