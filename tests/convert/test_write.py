# SPDX-License-Identifier: Apache-2.0
"""Plans, written checkpoints and verification."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import alone, rows, tiny, word_tokenizer
from zoo import CAUSAL, zoo_model

import headswap
from headswap.convert import verify

SEQ = "AutoModelForSequenceClassification"
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt_neox", "mixtral")
ENCODERS = ("bert", "roberta", "xlm-roberta")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_label_tokens_become_a_stock_checkpoint(
    saved: Any, tmp_path: Path, model_type: str
) -> None:
    report = headswap.convert_checkpoint(
        saved(model_type), tmp_path / "out", label_tokens=[7, 41, 9]
    )
    assert report.stock
    assert report.parity is not None
    assert report.parity <= 1e-5
    assert report.derived == ("score.weight",)
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", dtype=torch.float32
    ).eval()
    wanted = torch.cat(
        [
            tiny(model_type)(input_ids=torch.tensor([row])).logits[:, -1, [7, 41, 9]]
            for row in rows()
        ]
    )
    torch.testing.assert_close(alone(stock, rows()), wanted.detach(), atol=1e-5, rtol=0)
    again = headswap.load(tmp_path / "out")
    torch.testing.assert_close(alone(again, rows()), wanted.detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("model_type", [*ENCODERS, "gemma2", "llama"])
def test_a_classifier_is_written_as_it_is(saved: Any, tmp_path: Path, model_type: str) -> None:
    folder = saved(model_type, SEQ, num_labels=3)
    report = headswap.convert_checkpoint(folder, tmp_path / "out")
    assert report.stock
    assert not report.dropped
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    wanted = alone(tiny(model_type, SEQ, num_labels=3), rows())
    torch.testing.assert_close(alone(stock.eval(), rows()), wanted, atol=1e-5, rtol=0)


def test_a_class_that_transformers_has_not_loads_with_headswap(saved: Any, tmp_path: Path) -> None:
    report = headswap.convert_checkpoint(
        saved("granite"), tmp_path / "out", label_tokens=[7, 41], method="difference"
    )
    assert not report.stock
    logits = torch.cat(
        [tiny("granite")(input_ids=torch.tensor([row])).logits[:, -1, [7, 41]] for row in rows()]
    )
    found = alone(headswap.load(tmp_path / "out"), rows())
    torch.testing.assert_close(found, (logits[:, 1:] - logits[:, :1]).detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("model_type", "field"), [
    ("gemma2", "final_logit_softcapping"), ("phi", "bias"),
])  # fmt: skip
def test_what_a_stock_checkpoint_cannot_express_is_refused_by_name(
    saved: Any, tmp_path: Path, model_type: str, field: str
) -> None:
    with pytest.raises(headswap.UnsupportedHeadError, match=field):
        headswap.convert_checkpoint(saved(model_type), tmp_path / "out", label_tokens=[7, 41])
    assert not (tmp_path / "out").exists()


def test_a_target_in_the_way_is_left_alone(saved: Any, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine.txt").write_text("keep")
    with pytest.raises(headswap.CheckpointError, match="exists already"):
        headswap.convert_checkpoint(saved("llama"), target, label_tokens=[7, 41])
    assert [f.name for f in target.iterdir()] == ["mine.txt"]


def test_a_written_checkpoint_that_differs_is_removed(
    saved: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    def corrupt(_: Any, folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        state = load_file(folder / "model.safetensors")
        state["score.weight"] += 1
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    folder = saved("llama")
    monkeypatch.setattr("headswap.convert.write._copy_tokenizer", corrupt)
    with pytest.raises(headswap.ConversionError, match="differ"):
        headswap.convert_checkpoint(folder, tmp_path / "new" / "out", label_tokens=[7, 41])
    assert list((tmp_path / "new").iterdir()) == []


def test_the_tokenizer_the_labels_and_the_template_come_along(saved: Any, tmp_path: Path) -> None:
    folder = saved("llama", pad_token_id=None)
    word_tokenizer().save_pretrained(folder)
    headswap.convert_checkpoint(
        folder, tmp_path / "out", label_tokens=["no", "yes"], template="good {text} w1"
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["id2label"] == {"0": "no", "1": "yes"}
    assert config["pad_token_id"] == 1
    assert config["headswap"]["template"] == "good {text} w1"
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("no yes")["input_ids"] == word_tokenizer()("no yes")["input_ids"]


def test_the_backbone_keeps_its_dtype_and_the_head_stays_fp32(saved: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tiny("llama").to(torch.bfloat16).save_pretrained(tmp_path / "in")
    headswap.convert_checkpoint(tmp_path / "in", tmp_path / "out", label_tokens=[7, 41])
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert state["score.weight"].dtype == torch.float32
    assert state["model.norm.weight"].dtype == torch.bfloat16


def test_pipelines_take_a_converted_model(saved: Any) -> None:
    folder = saved("llama", SEQ, num_labels=3)
    tokenizer = word_tokenizer()
    model = headswap.load(folder)
    pipe = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)
    found = pipe(["w1 w2 w3", "w4 good"], top_k=None, batch_size=2, padding=True)
    ids = [tokenizer(text)["input_ids"] for text in ("w1 w2 w3", "w4 good")]
    wanted = alone(model, ids).softmax(-1)
    for scores, row in zip(found, wanted, strict=True):
        by_label = {each["label"]: each["score"] for each in scores}
        assert [by_label[f"LABEL_{i}"] for i in range(3)] == pytest.approx(row.tolist(), abs=1e-5)


# -- plans ----------------------------------------------------------------------------------------


def test_a_plan_reads_no_tensor_and_says_what_load_does(saved: Any) -> None:
    folder = saved("llama", tie_word_embeddings=False)
    plan = headswap.plan(folder, label_tokens=[7, 41])
    assert plan.ok
    actions = {t.name: t.action for t in plan.tensors}
    assert actions["score.weight"] == "derived"
    assert actions["lm_head.weight"] == "used"
    assert actions["model.norm.weight"] == "used"
    assert json.loads(json.dumps(plan.to_dict()))["ok"] is True
    assert "LlamaForSequenceClassification" in str(plan)


def test_a_plan_names_the_problem_that_load_would_raise(saved: Any) -> None:
    plan = headswap.plan(saved("llama"), num_labels=2)
    assert not plan.ok
    assert any("score.weight" in problem for problem in plan.problems)
    assert headswap.plan(saved("llama"), num_labels=2, allow_untrained_head=True).ok


def test_a_plan_sees_through_merged_experts(saved: Any) -> None:
    """transformers 5 keeps Mixtral's experts merged in memory and apart on disk."""
    plan = headswap.plan(saved("mixtral", SEQ, num_labels=2))
    assert plan.ok
    assert not [t for t in plan.tensors if t.action in ("missing", "unexpected", "dropped")]


# -- verify ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", [*FAMILIES, "gemma2", *ENCODERS])
def test_verify_finds_no_difference(saved: Any, model_type: str) -> None:
    report = verify(saved(model_type, SEQ, num_labels=3))
    assert report.ok
    assert {c.name: c.difference is not None for c in report.cases}["padded left"]
    assert report.reference.endswith("ForSequenceClassification")
    assert all(c.difference is None or c.difference <= 1e-5 for c in report.cases)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "granite"])
def test_verify_compares_label_tokens_with_the_causal_class(saved: Any, model_type: str) -> None:
    report = verify(saved(model_type), label_tokens=[7, 41], method="difference")
    assert report.ok
    assert "own token logits" in report.reference


def test_verify_checks_a_class_that_transformers_has_not(saved: Any, tmp_path: Path) -> None:
    headswap.convert_checkpoint(saved("granite"), tmp_path / "out", label_tokens=[7, 41])
    report = verify(tmp_path / "out")
    assert report.ok
    assert "GraniteForCausalLM" in report.reference


def test_verify_sees_a_wrong_formula(saved: Any, monkeypatch: Any) -> None:
    folder = saved("roberta", SEQ, num_labels=3)
    monkeypatch.setattr("headswap.heads.executor._activation", lambda _: torch.nn.ReLU())
    assert not verify(folder).ok


def test_a_constant_that_is_rounded_in_bf16_is_no_difference(tmp_path: Path) -> None:
    """Gemma scales its embeddings by a constant of the model's dtype; the text model of Gemma 3 is
    renamed on loading, so the whole model is loaded and compared."""
    zoo_model("gemma3", CAUSAL).to(torch.bfloat16).save_pretrained(tmp_path / "in")
    report = headswap.convert_checkpoint(tmp_path / "in", tmp_path / "out", label_tokens=[7, 41])
    assert report.parity < 1e-5
