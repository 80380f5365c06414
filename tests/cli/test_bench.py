# SPDX-License-Identifier: Apache-2.0
"""`headswap bench` measures the same numbers in each way; how fast they are is no test's matter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from command_line import headswap
from tiny_models import tiny, word_tokenizer

from headswap.cli.bench import reordered, sample_texts
from headswap.cli.racing import BATCHES, ONE, OURS

SEQ = "AutoModelForSequenceClassification"
LINES = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11"]


def saved(folder: Path, model_type: str, auto: str = SEQ) -> Path:
    more = {"num_labels": 3} if auto == SEQ else {}
    tiny(model_type, auto, **more).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def measured(*arguments: Any) -> dict[str, Any]:
    found = headswap("bench", *arguments, "--json", "--threads", 1)
    assert found.returncode == 0, found.stderr
    report: dict[str, Any] = json.loads(found.stdout)
    return report


def test_each_way_gives_the_same_logits_for_the_users_texts(tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(LINES))
    folder = saved(tmp_path / "model", "llama")
    found = measured(folder, "--file", file, "--rounds", 2)
    assert found["reference"] == "LlamaForSequenceClassification"
    assert (found["texts"], found["tokens"]) == (3, 11)
    assert found["machine"]["cpu"]
    assert [way["way"] for way in found["ways"]] == [OURS, ONE, BATCHES]
    for way in found["ways"]:
        assert way["difference"] <= 1e-5
        assert len(way["seconds"]) == 2
        assert min(way["texts_per_second"], way["one_text_ms"], way["first_answer_s"]) > 0


def test_low_precision_is_compared_with_transformers_in_fp32(tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(LINES))
    folder = saved(tmp_path / "model", "bert")
    found = measured(folder, "--file", file, "--rounds", 1, "--dtype", "bfloat16")
    plain, low = (
        transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    own = word_tokenizer()
    with torch.inference_mode():
        gaps = [
            (low(**batch).logits.float() - plain(**batch).logits).abs().max()
            for batch in (own(line, return_tensors="pt") for line in LINES)
        ]
    one = {way["way"]: way["difference"] for way in found["ways"]}[ONE]
    assert one == pytest.approx(float(max(gaps)), abs=1e-6)
    assert one > 1e-4


def test_what_int8_costs_is_told(tmp_path: Path) -> None:
    from headswap.spyre.precision import capabilities

    (file := tmp_path / "texts.txt").write_text("\n".join(LINES))
    folder = saved(tmp_path / "model", "bert")
    found = headswap("bench", folder, "--file", file, "--rounds", 1, "--dtype", "int8", "--json")
    if not capabilities().get("avx512_vnni"):
        assert (found.returncode, "VNNI" in found.stderr) == (3, True)
        return
    report = json.loads(found.stdout)
    assert (report["dtype"], report["int8"]) == ("float32", True)
    ours, one, _ = (way["difference"] for way in report["ways"])
    assert one == 0
    assert 1e-5 < ours < 0.1


def test_dtype_auto_is_resolved_and_said(tmp_path: Path) -> None:
    (file := tmp_path / "texts.txt").write_text("\n".join(LINES))
    folder = saved(tmp_path / "model", "bert")
    found = headswap("bench", folder, "--file", file, "--rounds", 1, "--dtype", "auto", "--json")
    assert "dtype auto: torch." in found.stderr
    assert json.loads(found.stdout)["dtype"] in ("float32", "bfloat16")


def test_label_tokens_are_measured_with_a_template_on_the_built_in_texts(tmp_path: Path) -> None:
    folder = saved(tmp_path / "causal", "llama", "AutoModelForCausalLM")
    found = headswap("bench", folder, "--label-token", "no", "--label-token", "yes",
                     "--template", "good {text}", "--rounds", 1, "--threads", 1)  # fmt: skip
    assert found.returncode == 0, found.stderr
    rows = [line.split("\t") for line in found.stdout.splitlines()]
    assert [row[0] for row in rows] == [OURS, ONE, BATCHES]
    assert all(float(row[-1]) <= 1e-5 for row in rows)
    assert "LlamaForCausalLM's own token logits" in found.stderr


def test_what_cannot_be_measured_is_refused_with_a_reason(tmp_path: Path) -> None:
    folder = saved(tmp_path / "causal", "llama", "AutoModelForCausalLM")
    for more, status, text in (
        (("--allow-untrained-head",), 3, "is random"),
        ((), 3, "score.weight"),
        (("--dtype", "int4"), 2, "is not one of"),
    ):
        found = headswap("bench", folder, *more)
        said = " ".join(found.stderr.replace("│", " ").split())
        assert (found.returncode, text in said) == (status, True), found.stderr


def test_later_rounds_have_other_rows_of_the_same_length_and_beginning() -> None:
    ids = list(range(20))
    moved, types = reordered((ids, [0] * 20), 1)
    assert moved != ids
    assert (moved[:10], moved[-1], sorted(moved), types) == (ids[:10], ids[-1], ids, [0] * 20)
    assert reordered((ids, None), 2)[0] != moved
    texts = sample_texts(64)
    assert texts == sample_texts(64)
    assert max(map(len, texts)) > 4 * min(map(len, texts))
