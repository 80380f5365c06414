# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint can do comes from its config and head, never from its folder's name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny

import headswap
from headswap.text import Classifier, Embedder, Reranker, roles

SEQ = "AutoModelForSequenceClassification"
CASES: list[tuple[str, str, dict[str, Any], tuple[str, ...]]] = [
    ("bert", SEQ, {"num_labels": 1}, ("classify", "score", "reward")),
    ("bert", SEQ, {"num_labels": 3}, ("classify",)),
    ("qwen3", SEQ, {"num_labels": 1}, ("classify", "score", "reward")),
    ("qwen3", "AutoModelForCausalLM", {}, ("generate", "embed")),
    ("qwen3", "AutoModel", {}, ("embed",)),
    ("bert", "AutoModel", {}, ("embed",)),
    ("bert", "AutoModelForTokenClassification", {}, ()),
]


@pytest.mark.parametrize(("model_type", "auto", "config", "offered"), CASES)
def test_config_and_head_decide_for_paths_and_models(
    model_type: str, auto: str, config: dict[str, Any], offered: tuple[str, ...], tmp_path: Path
) -> None:
    model = tiny(model_type, auto, **config)
    for name in ("x", "my-reranker", "reward-embedder"):
        model.save_pretrained(tmp_path / name)
        assert roles(tmp_path / name).offered == offered
    assert roles(model).offered == offered


def test_a_folders_name_changes_no_number(words: Any, tmp_path: Path) -> None:
    tiny("bert", SEQ, num_labels=1, pad_token_id=0).save_pretrained(tmp_path / "x")
    words("bert").save_pretrained(tmp_path / "x")
    shutil.copytree(tmp_path / "x", tmp_path / "my-reranker")
    found = [Reranker(tmp_path / name).score("w1", ["w2", "w3"]) for name in ("x", "my-reranker")]
    assert found[0] == found[1]
    (answer,) = Classifier(tmp_path / "my-reranker").classify([("w1", "w2")])
    assert answer.score == pytest.approx(found[0][0], abs=1e-6)


def test_a_refusal_lists_what_is_offered_and_what_is_missing(words: Any, tmp_path: Path) -> None:
    tiny("qwen3").save_pretrained(tmp_path / "my-reranker")
    words("xlm-roberta").save_pretrained(tmp_path / "my-reranker")
    with pytest.raises(
        headswap.ConversionError,
        match=r"gives no score .*It can: generate, embed\. .*label_tokens=.*cosine",
    ) as caught:
        Reranker(tmp_path / "my-reranker")
    assert caught.value.offered == ("generate", "embed")
    assert len(Embedder(tmp_path / "my-reranker").cosine("w1", ["w2", "w3"])) == 2


def test_a_template_is_refused_where_none_is_put_around_a_text(words: Any, tmp_path: Path) -> None:
    tiny("bert", "AutoModel", pad_token_id=0).save_pretrained(tmp_path)
    words("bert").save_pretrained(tmp_path)
    with pytest.raises(headswap.ConversionError, match=r"prompt=.*chat_template="):
        Embedder(tmp_path, template="w1 {text}")
