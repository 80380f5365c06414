# SPDX-License-Identifier: Apache-2.0
"""What may be given as texts, what is said of anything else, and which side is cut."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import alone, tiny

import headswap
from headswap.text import Calibration, Classifier, Embedder, Reranker, RewardModel
from headswap.text.encode import Encoder
from headswap.text.given import side_of
from headswap.text.lengths import Limit
from headswap.text.pairs import PairTemplate

SEQ = "AutoModelForSequenceClassification"
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"
Runs = dict[str, Callable[[Any], Any]]


@pytest.fixture(scope="module")
def runs(byte_pairs: Any) -> Runs:
    """Each class as a function of its texts; any string has ids in this tokenizer."""
    one = tiny("bert", SEQ, num_labels=1, vocab_size=330)
    own, chat = byte_pairs("bert"), byte_pairs("chat", chat=True)
    chat.chat_template = CHAT
    embedding = headswap.as_embedding_model(tiny("bert", "AutoModel", vocab_size=330))
    reward = RewardModel(tiny("qwen3", SEQ, num_labels=1, vocab_size=330), tokenizer=chat,
                         truncation="left")  # fmt: skip
    reranker = Reranker(one, tokenizer=own)
    return {
        "classify": lambda texts: [a.to_dict() for a in Classifier(one, tokenizer=own).classify(
            texts)],
        "score": lambda texts: reranker.score("w1", texts),
        "rank": lambda texts: [hit.to_dict() for hit in reranker.rank("w1", texts)],
        "embed": lambda texts: Embedder(embedding, tokenizer=own).embed(texts).tolist(),
        "reward": lambda texts: reward.reward(
            texts if not isinstance(texts, list) else
            [[{"role": "user", "content": text}] for text in texts]),
    }  # fmt: skip


KINDS = ("classify", "score", "rank", "embed", "reward")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["", " ", "\0", "👩‍👩‍👧‍👦 é", "\u202e\ufeff", "x" * 5000, "[SEP]"])
def test_any_text_has_a_finite_answer_that_is_json(kind: str, text: str, runs: Runs) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = runs[kind]([text, "plain"])
    assert len(found) == 2
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_is_a_list_and_no_texts_have_no_answers(kind: str, runs: Runs) -> None:
    assert runs[kind]([]) == []
    if kind != "reward":
        assert runs[kind](text for text in ("a", "b b")) == runs[kind](["a", "b b"])
        assert runs[kind]("a") == runs[kind](["a"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("texts", [None, 3, b"abc", bytearray(b"abc"), {"a": "b"}, 1.5])
def test_what_is_no_list_of_texts_is_refused_by_its_kind(kind: str, texts: Any, runs: Runs) -> None:
    with pytest.raises(headswap.InputError, match=type(texts).__name__.replace("NoneType", "None")):
        runs[kind](texts)


@pytest.mark.parametrize("kind", ["classify", "score", "rank", "embed"])
@pytest.mark.parametrize("text", [None, 3, b"secret", ["a", 3], {"a": 1}, float("nan")])
def test_a_wrong_text_is_refused_with_its_number_and_never_spelt_out(
    kind: str, text: Any, runs: Runs
) -> None:
    with pytest.raises(headswap.InputError, match=r"see (text|pair) 1") as caught:
        runs[kind](["fine", text])
    assert caught.value.rows == (1,)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["ab\ud83d", "\udc00", "x" * 4000 + "\udfff"])
def test_half_a_surrogate_pair_is_refused_with_its_place(kind: str, text: str, runs: Runs) -> None:
    with pytest.raises(headswap.InputError, match=r"(Text|Conversation) 1 .*U\+D") as caught:
        runs[kind](["fine", text])
    assert caught.value.rows == (1,)
    assert f"character {len(text) - 1}" in str(caught.value)


def test_half_a_surrogate_pair_in_a_query_an_instruction_or_a_prompt_is_refused(
    byte_pairs: Any, runs: Runs
) -> None:
    model, own = tiny("bert", SEQ, num_labels=1, vocab_size=330), byte_pairs("bert")
    template = "{instruction} q: {query} d: {document}"
    reranker = Reranker(model, tokenizer=own, template=template)
    with pytest.raises(headswap.InputError, match="surrogate"):
        reranker.score("\ud83d", ["a"], instruction="fine")
    with pytest.raises(headswap.InputError, match="Instruction 0 has half"):
        reranker.score("a", ["a"], instruction="\ud83d")
    embedder = Embedder(headswap.as_embedding_model(tiny("bert", "AutoModel", vocab_size=330)),
                        tokenizer=own)  # fmt: skip
    with pytest.raises(headswap.InputError, match="surrogate"):
        embedder.embed(["a"], prompt="\ud83d")
    assert len(embedder.embed(["a"], prompt="b ")) == 1


# -- token ids ------------------------------------------------------------------------------------


def test_token_ids_are_taken_as_they_are(words: Any) -> None:
    model = tiny("bert", SEQ, num_labels=3)
    classifier = Classifier(model, tokenizer=words("bert"), template="w1 {text} w2", batch_size=2)
    ids = [[5, 6, 7, 8], [9], [2, 5, 3], list(range(5, 69))]
    found = classifier.classify(ids)
    assert [row.ids for row in classifier.encode(ids)] == ids
    logits = torch.tensor([answer.logits for answer in found])
    torch.testing.assert_close(logits, alone(model, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("truncation", [True, False, "left"])
def test_too_many_ids_are_refused_with_both_numbers_and_the_model_stays_usable(
    truncation: Any, words: Any
) -> None:
    classifier = Classifier(tiny("bert", SEQ, num_labels=3), tokenizer=words("bert"),
                            truncation=truncation)  # fmt: skip
    before = classifier.classify([[5] * 10])
    with pytest.raises(headswap.InputError, match=r"Text 1 has 65 tokens.*limit is 64") as caught:
        classifier.classify([[5] * 10, [5] * 65])
    assert caught.value.rows == (1,)
    assert classifier.classify([[5] * 10]) == before


@pytest.mark.parametrize("wrong", [99, -1, 10**9])
def test_an_id_without_a_vector_is_refused_before_the_model_runs(wrong: int, words: Any) -> None:
    classifier = Classifier(tiny("llama", SEQ, num_labels=3), tokenizer=words("chat"))
    with pytest.raises(headswap.InputError, match=rf"Text 1 has the token id {wrong}, .* 0 to 98"):
        classifier.classify([[5, 6], [5, wrong]])
    assert len(classifier.classify([[98]])) == 1


def test_another_models_tokenizer_is_refused_by_its_ids(byte_pairs: Any) -> None:
    model = tiny("bert", SEQ, num_labels=1)
    with pytest.raises(headswap.InputError, match="is this its tokenizer") as caught:
        Reranker(model, tokenizer=byte_pairs("bert")).score("a", ["b", "b", "zebra ÿ"])
    assert 2 in caught.value.rows


@pytest.mark.parametrize("wrong", [["w1", [5, 6]], [[5, 6], "w1"], [[]], [[5, True]], [[5, 0.5]]])
def test_ids_and_texts_do_not_mix(wrong: Any, words: Any) -> None:
    classifier = Classifier(tiny("llama", SEQ, num_labels=3), tokenizer=words("chat"))
    with pytest.raises(headswap.InputError, match="a list"):
        classifier.classify(wrong)


# -- options of a wrong kind ----------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["2", 1.5, True, 0, -1, None.__class__])
def test_a_number_that_is_no_whole_number_is_refused_by_its_name(wrong: Any, words: Any) -> None:
    one, own = tiny("bert", SEQ, num_labels=1), words("bert")
    reranker = Reranker(one, tokenizer=own)
    embedder = Embedder(headswap.as_embedding_model(tiny("bert", "AutoModel")), tokenizer=own)
    calls: dict[str, Callable[[], Any]] = {
        "top_n": lambda: reranker.rank("w1", ["w2"], top_n=wrong),
        "top_k": lambda: Classifier(one, tokenizer=own).classify("w1", top_k=wrong),
        "dimensions": lambda: embedder.embed("w1", dimensions=wrong),
        "batch_size": lambda: Classifier(one, tokenizer=own, batch_size=wrong),
        "max_length": lambda: Classifier(one, tokenizer=own, max_length=wrong),
    }
    if wrong != 0 or wrong is False:
        calls["max_query_tokens"] = lambda: Reranker(one, tokenizer=own, max_query_tokens=wrong)
    for name, call in calls.items():
        with pytest.raises(headswap.ConversionError, match=f"{name}="):
            call()


def test_numpys_numbers_are_numbers(words: Any) -> None:
    one, own = tiny("bert", SEQ, num_labels=1), words("bert")
    reranker = Reranker(one, tokenizer=own, max_length=np.int64(32), batch_size=np.int32(2))
    assert len(reranker.rank("w1", ["w2", "w3"], top_n=np.int64(1))) == 1
    plain = reranker.score("w1", ["w2"], calibration={"temperature": 2.0})
    assert reranker.score("w1", ["w2"], calibration={"temperature": np.float32(2)}) == plain
    given = Calibration(temperature=np.float32(2))
    assert reranker.score("w1", ["w2"], calibration=given) == plain
    assert type(given.temperature) is float


def test_an_option_of_a_wrong_kind_is_refused_with_its_kind(words: Any, tmp_path: Any) -> None:
    one, own = tiny("qwen3", SEQ, num_labels=1), words("chat", chat=True)
    own.chat_template = CHAT
    embedder = Embedder(headswap.as_embedding_model(tiny("bert", "AutoModel")), tokenizer=own)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("got a int", lambda: Classifier(one, tokenizer=own, template=5)),  # type: ignore[arg-type]
        ("got a int", lambda: Reranker(one, tokenizer=own, template=5)),  # type: ignore[arg-type]
        ("got a int", lambda: embedder.embed("w1", prompt=5)),  # type: ignore[arg-type]
        ("is a list", lambda: Classifier(one, tokenizer=own, calibration=[1])),  # type: ignore[arg-type]
        ("no single token", lambda: RewardModel(one, tokenizer=own).token_rewards(
            [[{"role": "user", "content": "w1"}]], step_mark=1.5)),  # type: ignore[arg-type]
    ]  # fmt: skip
    for message, call in calls:
        with pytest.raises(headswap.ConversionError, match=message):
            call()
    one.save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    for kind in (Classifier, Reranker, RewardModel, Embedder):
        with pytest.raises(TypeError, match="colour, size: no option here, and none of headswap"):
            kind(tmp_path, size=1, colour=2)


def test_a_vector_that_is_not_finite_is_refused_by_its_text(words: Any) -> None:
    broken, own = tiny("bert", "AutoModel"), words("bert")
    with torch.no_grad():
        broken.get_input_embeddings().weight[own.convert_tokens_to_ids("w9")] = torch.inf
    embedder = Embedder(headswap.as_embedding_model(broken), tokenizer=own)
    with pytest.raises(headswap.InputError, match="vector of text 1 has numbers") as caught:
        embedder.embed(["w1", "w9", "w2"])
    assert caught.value.rows == (1,)
    assert len(embedder.embed(["w1", "w2"])) == 2


@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("activation", ["sigmoid", "identity"])
def test_logits_that_are_not_finite_are_refused_though_a_sigmoid_of_them_is(
    wrong: float, labels: int, activation: str, words: Any
) -> None:
    broken, own = tiny("bert", SEQ, num_labels=labels), words("bert")
    with torch.no_grad():
        broken.classifier.bias[0] = wrong
    with pytest.raises(headswap.InputError, match="not finite"):
        Classifier(broken, tokenizer=own, activation=activation).classify(["w1", "w2"])
    with pytest.raises(headswap.InputError, match="not finite"):
        Reranker(broken, tokenizer=own, activation=activation,
                 relevance=None if labels == 1 else "LABEL_0").rank("w1", ["w2"])  # fmt: skip


@pytest.mark.parametrize("kind", ["distilbert", "mpnet", "bert"])
def test_segments_of_a_tokenizer_reach_only_a_backbone_that_has_them(
    kind: str, words: Any, tmp_path: Any
) -> None:
    model, own = tiny(kind, SEQ, num_labels=1), words("bert")
    model.save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    wanted = Reranker(model, tokenizer=own).score("w1 w2", ["w3", "w4 w5"])
    found = Reranker(tmp_path).score("w1 w2", ["w3", "w4 w5"])
    assert found == pytest.approx(wanted, abs=1e-5)


# -- the side that is cut -------------------------------------------------------------------------


def quiet(encoder: Encoder, texts: list[Any]) -> Any:
    with pytest.warns(UserWarning, match="were cut"):
        return encoder.encode(texts)[0]


@pytest.mark.parametrize("own", ["left", "right"])
@pytest.mark.parametrize("asked", [True, "left", "right"])
def test_a_named_side_is_cut_else_the_tokenizers_own(
    own: str, asked: Any, words: Any, sentence: Any
) -> None:
    tokenizer = words("bert", truncation_side=own)
    text, side = sentence(30, 0), own if asked is True else asked
    full = tokenizer(text)["input_ids"]
    inner = full[1:9] if side == "right" else full[-9:-1]
    found = quiet(Encoder(tokenizer, Limit(10, "max_length"), truncation=asked), [text])
    assert found.ids == [full[0], *inner, full[-1]]
    template = Encoder(tokenizer, Limit(10, "max_length"), truncation=asked,
                       template="w1 {text} w2")  # fmt: skip
    around = tokenizer("w1 w2")["input_ids"]
    inner = full[1:8] if side == "right" else full[-8:-1]
    assert quiet(template, [text]).ids == [*around[:2], *inner, around[2]]
    assert tokenizer.truncation_side == own


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_pair_is_cut_on_the_side_and_its_fixed_parts_never(
    side: Any, words: Any, sentence: Any
) -> None:
    own = words("bert", truncation_side=side)
    query, document = "w1 w2 w3 w4", sentence(30, 0)
    found = quiet(Encoder(own, Limit(12, "max_length"), truncation=side), [(query, document)])
    reference = own(query, document, truncation="longest_first", max_length=12)
    assert found.ids == reference["input_ids"]
    assert found.types == reference["token_type_ids"]
    template = PairTemplate.compile("w9 {query} w8 {document} w7", own)
    made = Encoder(own, Limit(12, "max_length"), truncation=side, template=template)
    ids = own.convert_tokens_to_ids
    body = ids(document.split())
    kept = body[:4] if side == "right" else body[-4:]
    wanted = [ids("[CLS]"), *ids(["w9", "w1", "w2", "w3", "w4", "w8"]), *kept, ids("w7")]
    assert quiet(made, [(query, document)]).ids == wanted


def test_an_unknown_side_is_refused(words: Any) -> None:
    for wrong in ("middle", "", None, 1.5):
        with pytest.raises(headswap.ConversionError, match="'left'"):
            side_of(wrong, words("bert"))  # type: ignore[arg-type]


# -- where and in which dtype a model is loaded ---------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Classifier, Reranker, RewardModel, Embedder])
def test_device_and_dtype_reach_the_loaded_model_and_scores_are_fp32(
    kind: Any, dtype: torch.dtype, words: Any, tmp_path: Any
) -> None:
    base = tiny("qwen3", "AutoModel") if kind is Embedder else tiny("qwen3", SEQ, num_labels=1)
    base.save_pretrained(tmp_path)
    own = words("xlm-roberta")
    own.chat_template = CHAT
    own.save_pretrained(tmp_path)
    made = kind(tmp_path, dtype=dtype, device="cpu")
    assert next(made.model.parameters()).dtype == dtype
    assert made.model.device == torch.device("cpu")
    if kind is Embedder:
        assert made.embed(["w1"]).dtype == "float32"
    else:
        given = [[{"role": "user", "content": "w1 w2"}]] if kind is RewardModel else ["w1 w2"]
        run = {Classifier: "classify", Reranker: "score", RewardModel: "reward"}[kind]
        (found,) = getattr(made, run)(*(["w3"] if kind is Reranker else []), given)
        assert json.loads(json.dumps(found.to_dict() if kind is Classifier else found))
    with pytest.raises(headswap.ConversionError, match="device, dtype: options of loading"):
        kind(made.model, tokenizer=own, device="cpu", dtype=dtype)
