# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that say themselves which tokens are their labels convert by path alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import alone, rows, tiny, word_tokenizer

import headswap

WORDS = word_tokenizer()
NO, YES = (WORDS.convert_tokens_to_ids(word) for word in ("no", "yes"))


def saved(folder: Path, model_type: str = "qwen3", inner: Any = None, **fields: Any) -> Any:
    """A causal checkpoint with its tokenizer and `fields` added to its config.json."""
    model = tiny(model_type)
    model.save_pretrained(folder)
    WORDS.save_pretrained(folder)
    file = folder / "config.json"
    config = {**json.loads(file.read_text("utf-8")), **fields}
    if inner is not None:
        config["text_config"] = inner
    file.write_text(json.dumps(config), "utf-8")
    return model


def logit_score(folder: Path, at: str = "1_LogitScore", **config: Any) -> None:
    """The files of sentence-transformers' module, as it writes them."""
    kind = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.Transformer"},
               {"idx": 1, "name": "1", "path": at, "type": kind}]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules), "utf-8")
    (folder / at).mkdir()
    (folder / at / "config.json").write_text(json.dumps(config), "utf-8")


def token_logits(model: Any, ids: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(torch.tensor([row])).logits[:, -1] for row in ids])


def check(folder: Path, wanted: torch.Tensor, names: list[str]) -> None:
    """The folder loads, and converts into one that the stock class reads, by its path alone."""
    model = headswap.load(folder)
    torch.testing.assert_close(alone(model, rows()), wanted, atol=1e-5, rtol=0)
    assert [model.config.id2label[i] for i in range(len(names))] == names
    out = folder / "out"
    headswap.convert_checkpoint(folder, out)
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(out).eval()
    torch.testing.assert_close(alone(stock, rows()), wanted, atol=1e-5, rtol=0)
    assert list(stock.config.id2label.values()) == names
    again = headswap.load(out)
    torch.testing.assert_close(alone(again, rows()), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("model_type", "architecture"), [
    ("qwen3", "Qwen3ForCausalLM"),  # as Qwen3-Reranker and mxbai-rerank-v2 are stored
    ("qwen2", "Qwen2ForSequenceClassification"),  # renamed for other tools; no head is stored
])  # fmt: skip
def test_two_tokens_of_a_logit_score_module(
    tmp_path: Path, model_type: str, architecture: str
) -> None:
    source = saved(tmp_path, model_type, architectures=[architecture])
    logit_score(tmp_path, true_token_id=YES, false_token_id=NO)
    logits = token_logits(source, rows())
    check(tmp_path, logits[:, [YES]] - logits[:, [NO]], ["yes"])


def test_one_token_of_a_logit_score_module(tmp_path: Path) -> None:
    source = saved(tmp_path, "gemma")  # as bge-reranker-v2-gemma is stored, its rows tied
    logit_score(tmp_path, true_token_id=YES, false_token_id=None, module_input_name="causal_logits")
    check(tmp_path, token_logits(source, rows())[:, [YES]], ["yes"])


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3ForSequenceClassification"])
@pytest.mark.parametrize("fields", [
    {"is_original_qwen3_reranker": True},
    {"method": "from_2_way_softmax"},
    {"method": "from_2_way_softmax", "is_original_qwen3_reranker": True},
])  # fmt: skip
def test_the_config_fields_of_a_two_way_softmax(
    tmp_path: Path, fields: dict[str, Any], architecture: str
) -> None:
    source = saved(
        tmp_path, classifier_from_token=["no", "yes"], architectures=[architecture], **fields
    )
    logits = token_logits(source, rows())
    check(tmp_path, logits[:, [YES]] - logits[:, [NO]], ["yes"])


def test_the_config_fields_of_plain_rows(tmp_path: Path) -> None:
    source = saved(tmp_path, classifier_from_token=["no", "yes"], method="no_post_processing")
    check(tmp_path, token_logits(source, rows())[:, [NO, YES]], ["no", "yes"])


def test_a_head_that_is_stored_is_not_made_again(tmp_path: Path) -> None:
    stock = tiny("qwen3", "AutoModelForSequenceClassification", num_labels=1)
    stock.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    said = {"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"}
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **said}), "utf-8")
    model = headswap.load(tmp_path)
    torch.testing.assert_close(alone(model, rows()), alone(stock, rows()), atol=1e-5, rtol=0)
    assert "not done again" in str(headswap.plan(tmp_path))


def test_what_the_caller_says_goes_before(tmp_path: Path) -> None:
    source = saved(tmp_path)
    logit_score(tmp_path, true_token_id=YES, false_token_id=NO)
    found = headswap.load(tmp_path, label_tokens=[7, 8, 9])
    wanted = token_logits(source, rows())[:, [7, 8, 9]]
    torch.testing.assert_close(alone(found, rows()), wanted, atol=1e-5, rtol=0)
    with pytest.raises(headswap.HeadswapError, match=r"1_LogitScore.*allow_untrained_head"):
        headswap.load(tmp_path, head="bert")
    fresh = headswap.load(tmp_path, num_labels=3, allow_untrained_head=True)
    assert fresh.untrained_head
    assert fresh.config.num_labels == 3
    assert headswap.load(tmp_path, task="embed").config.model_type == "qwen3"


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"method": "from_2_way_softmax"}, r"method='from_2_way_softmax' but no classifier_from_token"),
    ({"is_original_qwen3_reranker": True}, r"is_original_qwen3_reranker=True but no"),
    ({"classifier_from_token": ["no", "yes"]}, "but no method"),
    (
        {"classifier_from_token": ["no", "yes"], "method": "softmax"},
        r"method='softmax' is unknown; known: from_2_way_softmax, no_post_processing",
    ),
    (
        {"classifier_from_token": ["no", "yes"], "method": "no_post_processing",
         "inner": {"classifier_from_token": ["yes", "no"]}},
        r"\['no', 'yes'\], and \['yes', 'no'\] in text_config",
    ),
    ({"classifier_from_token": "yes", "method": "no_post_processing"}, "expected a list"),
    (
        {"classifier_from_token": ["yes"], "method": "from_2_way_softmax"},
        "two-way softmax needs two",
    ),
    ({"classifier_from_token": ["no", "two words"], "method": "no_post_processing"}, "two words"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "said"), FAULTS, ids=[said[:20] for _, said in FAULTS])
def test_half_a_statement_is_refused(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    saved(tmp_path, **fields)
    for call in (headswap.load, headswap.plan):
        with pytest.raises(headswap.LabelError, match=said):
            call(tmp_path)


@pytest.mark.parametrize("config", [
    {}, {"true_token_id": "yes"}, {"true_token_id": True}, {"true_token_id": 999},
    {"true_token_id": YES, "module_input_name": "scores"},
], ids=str)  # fmt: skip
def test_a_module_that_says_something_else_is_refused(tmp_path: Path, config: Any) -> None:
    saved(tmp_path)
    logit_score(tmp_path, **config)
    with pytest.raises(headswap.LabelError):
        headswap.load(tmp_path)


def test_two_statements_must_agree(tmp_path: Path) -> None:
    saved(tmp_path, classifier_from_token=["no", "yes"], method="from_2_way_softmax")
    logit_score(tmp_path, true_token_id=NO, false_token_id=YES)
    with pytest.raises(headswap.LabelError, match=r"1_LogitScore.*config\.json"):
        headswap.load(tmp_path)


def test_a_module_outside_the_folder_is_not_read(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    saved(inside)
    logit_score(inside, at="../outside", true_token_id=YES)
    with pytest.raises(headswap.CheckpointError, match="outside its folder"):
        headswap.load(inside)


def test_another_tools_method_field_is_left_alone(tmp_path: Path) -> None:
    saved(tmp_path, method="awq")
    with pytest.raises(headswap.MissingHeadError):
        headswap.load(tmp_path)
