# SPDX-License-Identifier: Apache-2.0
"""Pairs in, scores out: equal to sentence-transformers' CrossEncoder and to hand-built ids."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny

import headswap
from headswap.text import Classifier, Reranker

SEQ = "AutoModelForSequenceClassification"
PADS = {"bert": 0, "xlm-roberta": 1}
QUERY = "w1 w2 w3"
IDENTITY = "torch.nn.modules.linear.Identity"
ACTIVATIONS = {"identity": torch.nn.Identity, "sigmoid": torch.nn.Sigmoid}


@pytest.fixture(scope="module")
def folder_of(words: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`folder_of(model_type, **config)`: a tiny one-label checkpoint with its tokenizer."""

    def make(model_type: str, labels: int = 1, **config: Any) -> Path:
        folder = tmp_path_factory.mktemp(model_type)
        model = tiny(model_type, SEQ, num_labels=labels, pad_token_id=PADS[model_type])
        for name, value in config.items():
            setattr(model.config, name, value)
        model.save_pretrained(folder)
        words(model_type).save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def chat_lm(words: Any, tmp_path: Path) -> Path:
    """A causal checkpoint whose tokenizer has no form for a pair."""
    tiny("qwen3").save_pretrained(tmp_path / "lm")
    words("chat", chat=True).save_pretrained(tmp_path / "lm")
    return tmp_path / "lm"


def documents(sentence: Any) -> list[str]:
    return [sentence(n, n) for n in (4, 17, 1, 9, 4)]


# -- against sentence-transformers ----------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, "identity", "sigmoid"])
@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta"])
def test_scores_are_those_of_a_cross_encoder_saved_its_way(
    model_type: str, activation: str | None, folder_of: Any, sentence: Any, tmp_path: Path
) -> None:
    pytest.importorskip("sentence_transformers.base")  # since release 6
    import sentence_transformers as st

    chosen = ACTIVATIONS[activation]() if activation else None
    st.CrossEncoder(str(folder_of(model_type)), activation_fn=chosen).save_pretrained(
        str(tmp_path / "ce")
    )
    reference = st.CrossEncoder(str(tmp_path / "ce"), device="cpu")
    given = documents(sentence)
    pairs = [(QUERY, each) for each in given]
    reranker = Reranker(tmp_path / "ce")
    assert reranker.activation.name == (activation or "sigmoid")
    assert reranker.score(QUERY, given) == pytest.approx(reference.predict(pairs), abs=1e-5)
    raw = reference.predict(pairs, activation_fn=torch.nn.Identity())
    assert reranker.score(QUERY, given, activation="identity") == pytest.approx(raw, abs=1e-5)
    ranked = reference.rank(QUERY, given)
    assert [hit.index for hit in reranker.rank(QUERY, given)] == [r["corpus_id"] for r in ranked]


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"sentence_transformers": {"activation_fn": IDENTITY}}, "identity"),
        ({"sbert_ce_default_activation_function": IDENTITY}, "identity"),
        ({"function_to_apply": "none"}, "identity"),
        ({"problem_type": "regression"}, "identity"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({}, "sigmoid"),
    ],
)  # fmt: skip
def test_a_saved_activation_decides_on_every_route(
    config: dict[str, Any], name: str, folder_of: Any
) -> None:
    folder = folder_of("bert", **config)
    reranker, classifier = Reranker(folder), Classifier(folder)
    assert reranker.activation == classifier.activation
    assert reranker.activation.name == name
    (answer,) = classifier.classify([(QUERY, "w4")])
    assert reranker.score(QUERY, "w4") == pytest.approx([answer.score], abs=1e-6)
    (hit,) = reranker.rank(QUERY, ["w4"], activation="identity")
    assert [hit.score, hit.logit] == pytest.approx(answer.logits * 2, abs=1e-6)


# -- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta"])
def test_ids_are_the_tokenizers_own_pairs(
    model_type: str, words: Any, sentence: Any, folder_of: Any
) -> None:
    given = documents(sentence)
    own = words(model_type)([QUERY] * len(given), given)
    rows = Reranker(folder_of(model_type)).encode(QUERY, given)
    assert [row.ids for row in rows] == own["input_ids"]
    assert [row.types for row in rows] == own.get("token_type_ids", [None] * len(given))


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_a_score_depends_on_its_pair_alone(batch_size: int, folder_of: Any, sentence: Any) -> None:
    reranker = Reranker(folder_of("bert"), batch_size=batch_size)
    given = documents(sentence)
    together = reranker.score(QUERY, given, activation="identity")
    alone_ = [reranker.score(QUERY, each, activation="identity")[0] for each in given]
    assert together == pytest.approx(alone_, abs=1e-5)
    pairwise = reranker.score([QUERY] * len(given), given, activation="identity")
    assert pairwise == pytest.approx(together, abs=1e-6)


def test_results_carry_their_index_and_duplicates_stay_in_order(folder_of: Any) -> None:
    reranker = Reranker(folder_of("bert"), batch_size=1)
    hits = reranker.rank(QUERY, ["w5 w6", "w7", "w5 w6"])
    assert sorted(hit.index for hit in hits) == [0, 1, 2]
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    same = [hit for hit in hits if hit.index in (0, 2)]
    assert [hit.index for hit in same] == [0, 2]
    assert same[0].score == same[1].score
    assert reranker.rank(QUERY, ["w5 w6", "w7", "w5 w6"], top_n=1) == hits[:1]
    json.dumps([hit.to_dict() for hit in hits])
    assert reranker.rank(QUERY, []) == []


def test_only_one_query_or_as_many_as_documents(folder_of: Any) -> None:
    reranker = Reranker(folder_of("bert"))
    with pytest.raises(headswap.InputError, match="2 queries and 3 documents"):
        reranker.score(["w1", "w2"], ["w3", "w4", "w5"])
    with pytest.raises(headswap.ConversionError, match="top_n=0"):
        reranker.rank(QUERY, ["w1"], top_n=0)


def test_scores_beyond_a_sigmoids_precision_keep_their_order(folder_of: Any, sentence: Any) -> None:
    model = headswap.load(folder_of("bert"))
    with torch.no_grad():
        model.classifier.weight *= 1e-3
        model.classifier.bias += 40.0
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder_of("bert"))
    reranker = Reranker(model, tokenizer=tokenizer)
    hits = reranker.rank(QUERY, documents(sentence))
    assert {hit.score for hit in hits} == {1.0}
    assert [h.logit for h in hits] == sorted((h.logit for h in hits), reverse=True)


def test_several_labels_need_the_name_of_the_relevant_one(folder_of: Any, words: Any) -> None:
    names = {
        "id2label": {0: "no", 1: "maybe", 2: "yes"},
        "label2id": {"no": 0, "maybe": 1, "yes": 2},
    }
    folder = folder_of("bert", labels=3, **names)
    with pytest.raises(headswap.ConversionError, match=r"It can: classify.*relevance="):
        Reranker(folder)
    with pytest.raises(headswap.ConversionError, match="relevance='good'"):
        Reranker(folder, relevance="good")
    with pytest.raises(headswap.ConversionError, match=r"3 labels .*no relevance="):
        Reranker(headswap.load(folder), tokenizer=words("bert"))
    (answer,) = Classifier(folder).classify([(QUERY, "w4 w5")])
    (score,) = Reranker(folder, relevance="yes").score(QUERY, "w4 w5")
    assert score == pytest.approx(answer.scores["yes"], abs=1e-6)


# -- budgets and limits ---------------------------------------------------------------------------


def test_budgets_cut_each_text_for_itself(folder_of: Any, sentence: Any, words: Any) -> None:
    query, document = sentence(9, 1), sentence(20, 2)
    reranker = Reranker(folder_of("bert"), max_query_tokens=4, max_document_tokens=8)
    (row,) = reranker.encode(query, document)
    short = (" ".join(query.split()[:4]), " ".join(document.split()[:8]))
    wanted = words("bert")(*short)
    assert (row.ids, row.types) == (wanted["input_ids"], wanted["token_type_ids"])
    assert row.truncated
    (whole,) = Reranker(folder_of("bert"), max_document_tokens=0).encode(query, document)
    assert len(whole.ids) == 32
    with pytest.raises(headswap.ConversionError, match="max_query_tokens=-1"):
        Reranker(folder_of("bert"), max_query_tokens=-1)


@pytest.mark.filterwarnings("ignore:.*were cut")
@pytest.mark.parametrize(("first", "second"), [(3, 30), (30, 3), (20, 20), (2, 2), (19, 30)])
def test_budgets_and_a_limit_cut_the_longer_text_as_the_tokenizer_does(
    first: int, second: int, folder_of: Any, sentence: Any, words: Any
) -> None:
    query, document = sentence(first, 1), sentence(second, 2)
    reranker = Reranker(folder_of("bert"), max_query_tokens=100, max_length=16)
    (row,) = reranker.encode(query, document)
    own = words("bert")(query, document, truncation="longest_first", max_length=16)
    assert (row.ids, row.types) == (own["input_ids"], own["token_type_ids"])


# -- templates ------------------------------------------------------------------------------------

TEMPLATE = "<|im_start|> w1 w2 {query} w3 <|im_end|> {document} <|im_end|> w4"
LABELS: dict[str, Any] = {"label_tokens": [7, 9], "method": "difference"}


def by_hand(words: Any, query: str, document: str) -> list[int]:
    own = words("chat", chat=True)

    def ids(text: str) -> list[int]:
        found: list[int] = own(text, add_special_tokens=False)["input_ids"]
        return found

    start, end = own.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    return [own.bos_token_id, start, *ids("w1 w2"), *ids(query), *ids("w3"), end,
            *ids(document), end, *ids("w4")]  # fmt: skip


def test_a_template_gives_the_ids_and_the_score_of_the_hand_built_form(
    chat_lm: Path, words: Any, sentence: Any
) -> None:
    given = documents(sentence)
    reranker = Reranker(chat_lm, template=TEMPLATE, **LABELS)
    rows = [by_hand(words, QUERY, each) for each in given]
    assert [row.ids for row in reranker.encode(QUERY, given)] == rows
    logits = _last_logits(chat_lm, rows)
    wanted = logits[:, 9] - logits[:, 7]
    assert reranker.score(QUERY, given, activation="identity") == pytest.approx(
        wanted.tolist(), abs=1e-5
    )
    assert reranker.score(QUERY, given) == pytest.approx(wanted.sigmoid().tolist(), abs=1e-5)
    both = Reranker(chat_lm, template=TEMPLATE, label_tokens=[7, 9], relevance="token 9")
    assert both.score(QUERY, given) == pytest.approx(reranker.score(QUERY, given), abs=1e-6)


@torch.no_grad()
def _last_logits(folder: Path, rows: list[list[int]]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return torch.cat([model(torch.tensor([row])).logits[:, -1] for row in rows])


@pytest.mark.filterwarnings("ignore:.*were cut")
@pytest.mark.parametrize("limit", [40, 24, 14, 12])
def test_only_the_document_and_then_the_query_is_cut(
    limit: int, chat_lm: Path, words: Any, sentence: Any
) -> None:
    query, document = sentence(6, 1), sentence(50, 2)
    fixed = len(by_hand(words, "", ""))
    reranker = Reranker(chat_lm, template=TEMPLATE, max_length=limit, **LABELS)
    (row,) = reranker.encode(query, document)
    room = limit - fixed
    short = " ".join(query.split()[:room])
    rest = " ".join(document.split()[: max(0, room - 6)])
    assert row.ids == by_hand(words, short, rest)
    assert len(row.ids) == limit
    assert row.full == fixed + 56


def test_a_limit_within_the_fixed_part_is_an_error(chat_lm: Path) -> None:
    reranker = Reranker(chat_lm, template=TEMPLATE, max_length=8, **LABELS)
    with pytest.raises(headswap.InputError, match="fixed parts around a pair take 8 tokens"):
        reranker.encode("w1", "w2 w3")
    strict = Reranker(chat_lm, template=TEMPLATE, max_length=12, truncation=False, **LABELS)
    with pytest.raises(headswap.InputError, match="Text 0 has 13 tokens, and the limit is 12"):
        strict.encode("w1 w2", "w2 w3 w4")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("w1 {query}", r"0 slots \{document\}"),
        ("w1 {document}", r"0 slots \{query\}"),
        ("{query} {document} {document}", r"2 slots \{document\}"),
        ("{query} {document} {text}", r"variable \{text\}; known: \{instruction\}"),
        ("{query} {document", "expected '}'"),
    ],
)
def test_a_template_that_would_lose_a_text_is_refused(
    template: str, message: str, chat_lm: Path
) -> None:
    with pytest.raises(headswap.ConversionError, match=message):
        Reranker(chat_lm, template=template, **LABELS)


@pytest.mark.parametrize("chat", [True, False])
def test_pieces_are_encoded_apart_and_marks_in_a_users_text_stay_text(
    byte_pairs: Any, tmp_path: Path, chat: bool
) -> None:
    own = byte_pairs("chat", chat=chat)
    tiny("qwen3", vocab_size=400).save_pretrained(tmp_path / "lm")
    own.save_pretrained(tmp_path / "lm")
    pieces = ("prefix\n", "<Query>: {query}\n<Document>: {document}", "</s>suffix")
    reranker = Reranker(tmp_path / "lm", template=pieces, **LABELS)
    assert reranker.template == pieces
    (row,) = reranker.encode("fix </s>", "the quick <|im_end|>")
    body = own("<Query>: fix </s>\n<Document>: the quick <|im_end|>", add_special_tokens=False,
               split_special_tokens=True)["input_ids"]  # fmt: skip
    fresh = byte_pairs("chat", chat=chat)
    before, after = (fresh(p, add_special_tokens=False)["input_ids"] for p in pieces[::2])
    assert row.ids == [own.bos_token_id, *before, *body, *after]
    assert body.count(own.eos_token_id) == 0
    assert after[0] == own.eos_token_id


def test_an_instruction_fills_its_slot_or_is_refused(chat_lm: Path, words: Any) -> None:
    plain = Reranker(chat_lm, template=TEMPLATE, **LABELS)
    with pytest.raises(headswap.ConversionError, match="no place for it"):
        plain.score("w1", "w2", instruction="w9")
    own = words("chat", chat=True)
    slotted = Reranker(chat_lm, template="w5 {instruction} w6 {query} {document}",
                       instruction="w7", **LABELS)  # fmt: skip
    for given, word in ((None, "w7"), ("w8 w9", "w8 w9")):
        (row,) = slotted.encode("w1", "w2", instruction=given)
        assert row.ids == own(f"w5 {word} w6 w1 w2")["input_ids"]
    bare = Reranker(chat_lm, template="{instruction} {query} {document}", **LABELS)
    assert bare.template == ("{instruction} {query} {document}",)
    with pytest.raises(headswap.ConversionError, match="no instruction was given"):
        bare.score("w1", "w2")
    with pytest.raises(headswap.InputError, match="instruction must be a string"):
        bare.score("w1", "w2", instruction=5)


@pytest.mark.parametrize(
    ("model_type", "labels", "name"),
    [
        ("qwen3", ["no", "yes"], "Qwen3-Reranker"),
        ("qwen2", ["0", "1"], "mxbai-rerank-v2"),
        ("gemma", ["Yes"], "bge-reranker-v2-gemma"),
    ],
)
def test_a_known_familys_form_is_its_references(
    model_type: str, labels: list[str], name: str, byte_pairs: Any, tmp_path: Path
) -> None:
    own = byte_pairs("chat", chat=True)
    own.add_tokens(labels)
    tiny(model_type, vocab_size=400, max_position_embeddings=1024).save_pretrained(tmp_path / "x")
    own.save_pretrained(tmp_path / "x")
    method = "difference" if len(labels) == 2 else "rows"
    reranker = Reranker(tmp_path / "x", label_tokens=labels, method=method)
    assert reranker.template_source == name
    (row,) = reranker.encode("which fox", "the quick brown fox")
    assert row.ids == REFERENCES[name](own, "which fox", "the quick brown fox", None)
    if name != "bge-reranker-v2-gemma":
        (row,) = reranker.encode("which fox", "the quick", instruction="be brief")
        assert row.ids == REFERENCES[name](own, "which fox", "the quick", "be brief")
    copied = tmp_path / "converted"
    headswap.convert_checkpoint(tmp_path / "x", copied, label_tokens=labels, method=method)
    assert Reranker(copied).template == reranker.template
    assert Reranker(copied).score("a", "b") == pytest.approx(reranker.score("a", "b"), abs=1e-5)


def _apart(tokenizer: Any, *pieces: str) -> list[int]:
    ids: list[int] = [tokenizer.bos_token_id]
    for piece in pieces:
        ids += tokenizer(piece, add_special_tokens=False)["input_ids"]
    return ids


def _qwen3(tokenizer: Any, query: str, document: str, instruction: str | None) -> list[int]:
    task = (
        instruction or "Given a web search query, retrieve relevant passages that answer the query"
    )
    return _apart(
        tokenizer,
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        "and the Instruct provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n"
        "<|im_start|>user\n",
        f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    )  # fmt: skip


def _mxbai(tokenizer: Any, query: str, document: str, instruction: str | None) -> list[int]:
    asked = f"query: {query}"
    return _apart(
        tokenizer,
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
        "<|im_end|>\n<|im_start|>user\n",
        f"instruction: {instruction}\n{asked}" if instruction else asked,
        "\n", f"document: {document}", "\n",
        "You are a search relevance expert who evaluates how well documents match search queries. "
        "For each query-document pair, carefully analyze the semantic relationship between them, "
        "then provide your binary relevance judgment (0 for not relevant, 1 for relevant)."
        "\nRelevance:",
        "<|im_end|>\n<|im_start|>assistant\n",
    )  # fmt: skip


def _gemma(tokenizer: Any, query: str, document: str, instruction: str | None) -> list[int]:
    return _apart(
        tokenizer, f"A: {query}", "\n", f"B: {document}", "\n",
        "Given a query A and a passage B, determine whether the passage contains an answer to the "
        "query by providing a prediction of either 'Yes' or 'No'.",
    )  # fmt: skip


REFERENCES: dict[str, Callable[..., list[int]]] = {
    "Qwen3-Reranker": _qwen3,
    "mxbai-rerank-v2": _mxbai,
    "bge-reranker-v2-gemma": _gemma,
}


def test_a_language_model_without_a_template_is_told_once_or_refused(
    chat_lm: Path, words: Any, tmp_path: Path
) -> None:
    with pytest.raises(headswap.ConversionError, match="no separator between two texts"):
        Reranker(chat_lm, **LABELS).score("w1", "w2")
    tiny("qwen3").save_pretrained(tmp_path / "x")
    words("xlm-roberta").save_pretrained(tmp_path / "x")
    reranker = Reranker(tmp_path / "x", template=None, **LABELS)
    with pytest.warns(UserWarning, match="almost at random") as caught:
        reranker.score("w1", "w2")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reranker.score("w1", "w2")


# -- what the files say ---------------------------------------------------------------------------


def test_a_language_model_saved_as_a_cross_encoder_keeps_its_tokens(
    words: Any, tmp_path: Path
) -> None:
    pytest.importorskip("sentence_transformers.base")  # since release 6
    import sentence_transformers as st
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    tiny("qwen3").save_pretrained(tmp_path / "lm")
    words("xlm-roberta").save_pretrained(tmp_path / "lm")
    module = Transformer(str(tmp_path / "lm"), transformer_task="text-generation")
    reference = st.CrossEncoder(
        modules=[module, LogitScore(true_token_id=9, false_token_id=7)], device="cpu"
    )
    reference.save_pretrained(str(tmp_path / "ce"))
    reranker = Reranker(tmp_path / "ce", template=None)
    with pytest.warns(UserWarning, match="almost at random"):
        found = reranker.score("w1 w2", ["w3", "w4 w5 w6"])
    wanted = reference.predict([("w1 w2", "w3"), ("w1 w2", "w4 w5 w6")])
    assert found == pytest.approx(wanted, abs=1e-5)


def test_modules_that_headswap_does_not_run_are_refused_by_name(folder_of: Any) -> None:
    folder = folder_of("bert")
    listed = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
              {"idx": 1, "path": "1_CNN", "type": "sentence_transformers.models.CNN"}]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(headswap.UnsupportedHeadError, match="CNN"):
        Reranker(folder)


# -- the side that is cut, with budgets -----------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*were cut")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("limit", [None, 16, 10, 7])
@pytest.mark.parametrize(("query", "document"), [(4, 8), (9, 3), (0, 5), (6, 0)])
def test_budgets_and_a_limit_keep_the_named_side_of_both_texts(
    side: Any, limit: int | None, query: int, document: int, folder_of: Any, sentence: Any,
    words: Any
) -> None:  # fmt: skip
    texts = sentence(9, 1).split(), sentence(20, 2).split()
    short = []
    for text, most in zip(texts, (query, document), strict=True):
        kept = text if not most else text[-most:] if side == "left" else text[:most]
        short.append(" ".join(kept))
    own = words("bert")
    own.truncation_side = side
    wanted = own(*short, truncation="longest_first", max_length=limit or 64)
    reranker = Reranker(folder_of("bert"), max_query_tokens=query, max_length=limit,
                        max_document_tokens=document, truncation=side)  # fmt: skip
    (row,) = reranker.encode(*map(" ".join, texts))
    assert (row.ids, row.types) == (wanted["input_ids"], wanted["token_type_ids"])


@pytest.mark.filterwarnings("ignore:.*were cut")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("limit", [40, 20, 14, 12, 9])
def test_the_named_side_is_cut_within_a_templates_slots_alone(
    side: Any, limit: int, chat_lm: Path, words: Any, sentence: Any
) -> None:
    query, document = sentence(9, 1).split(), sentence(50, 2).split()
    reranker = Reranker(chat_lm, template=TEMPLATE, max_length=limit, max_query_tokens=6,
                        max_document_tokens=10, truncation=side, **LABELS)  # fmt: skip
    (row,) = reranker.encode(" ".join(query), " ".join(document))
    room = limit - len(by_hand(words, "", ""))
    first = min(6, room)
    second = min(10, room - first)
    if side == "left":
        short = query[len(query) - first :], document[len(document) - second :]
    else:
        short = query[:first], document[:second]
    assert row.ids == by_hand(words, *map(" ".join, short))
    assert (len(row.ids) <= limit, row.truncated) == (True, True)


def test_texts_that_only_a_budget_cuts_are_counted_too(folder_of: Any, sentence: Any) -> None:
    reranker = Reranker(folder_of("bert"), max_document_tokens=8)
    with pytest.warns(UserWarning, match="1 of 2 texts were cut .*budgets") as caught:
        rows = reranker.encode("w1", [sentence(9, 1), sentence(8, 2)])
    assert len(caught) == 1
    assert [row.truncated for row in rows] == [True, False]
