# SPDX-License-Identifier: Apache-2.0
"""One text has one score: on any route, beside any others, in any dtype, from any folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import alone, tiny

import headswap
from headswap.text import Classifier, Embedder, Reranker, RewardModel, roles

SEQ = "AutoModelForSequenceClassification"
FAMILY = {"bert": "bert", "qwen3": "xlm-roberta"}
PAIRS = [("w1 w2", "w3 w4"), ("w1 w2", "w5"), ("w1 w2", "w6 w7 w8 w9 w10")]
DOCUMENTS = [second for _, second in PAIRS]
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"
Save = Callable[..., Path]


@pytest.fixture
def saved(words: Any, tmp_path: Path) -> Save:
    """`saved(model_type, labels, ...)`: a folder with a tiny classifier and its tokenizer."""

    def make(model_type: str, labels: int, name: str = "x", **fields: Any) -> Path:
        pad = 0 if model_type == "bert" else 1
        tiny(model_type, SEQ, num_labels=labels, pad_token_id=pad).save_pretrained(tmp_path / name)
        own = words(FAMILY[model_type])
        own.chat_template = CHAT
        own.save_pretrained(tmp_path / name)
        file = tmp_path / name / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **fields}), "utf-8")
        return tmp_path / name

    return make


def crafted(words: Any, *biases: float) -> dict[str, Any]:
    """A BERT classifier whose logits are `biases` whatever the text."""
    model = tiny("bert", SEQ, num_labels=len(biases), pad_token_id=0)
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor(biases))
    return {"source": model, "tokenizer": words("bert")}


# -- routes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("problem", [None, "regression", "multi_label_classification"])
@pytest.mark.parametrize("model_type", ["bert", "qwen3"])
def test_every_way_to_load_a_model_gives_the_same_raw_numbers_and_the_same_function(
    model_type: str, problem: str | None, labels: int, saved: Save, tmp_path: Path
) -> None:
    folder = saved(model_type, labels, **({} if problem is None else {"problem_type": problem}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    stock = getattr(transformers, SEQ).from_pretrained(folder).eval()
    loaded = headswap.load(folder)
    loaded.save_pretrained(tmp_path / "again")
    tokenizer.save_pretrained(tmp_path / "again")
    ways: list[dict[str, Any]] = [
        {"source": folder}, {"source": str(folder)}, {"source": tmp_path / "again"},
        *({"source": model, "tokenizer": tokenizer}
          for model in (stock, loaded)),
    ]  # fmt: skip
    ids = [tokenizer(*pair)["input_ids"] for pair in PAIRS]
    types = [tokenizer(*pair).get("token_type_ids") for pair in PAIRS]
    more = [{} if t is None else {"token_type_ids": torch.tensor([t])} for t in types]
    raw = torch.cat([alone(stock, [row], **m) for row, m in zip(ids, more, strict=True)])
    name = {"regression": "identity", "multi_label_classification": "sigmoid"}.get(
        str(problem), "sigmoid" if labels == 1 else "softmax"
    )
    wanted = {"identity": raw, "sigmoid": raw.sigmoid(), "softmax": raw.softmax(-1)}[name]
    for way in ways:
        classifier = Classifier(**way)
        relevance = classifier.labels[-1] if labels > 1 else None
        reranker = Reranker(**way, relevance=relevance, template="auto" if model_type == "bert"
                            else "{query}</s></s>{document}</s>")  # fmt: skip
        assert classifier.activation == reranker.activation
        assert classifier.activation.name == name
        answers = classifier.classify(PAIRS)
        found = torch.tensor([answer.logits for answer in answers])
        torch.testing.assert_close(found, raw, atol=1e-5, rtol=0)
        found = torch.tensor([list(answer.scores.values()) for answer in answers])
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
        if model_type == "bert":
            scores = reranker.score("w1 w2", DOCUMENTS)
            assert scores == pytest.approx(wanted[:, -1].tolist(), abs=1e-5)
            untouched = reranker.score("w1 w2", DOCUMENTS, activation="identity")
            assert untouched == pytest.approx(raw[:, -1].tolist(), abs=1e-5)


def test_an_unknown_problem_type_in_a_file_is_refused_with_the_known_ones(saved: Save) -> None:
    folder = saved("bert", 1, problem_type="foo")
    for kind in (Classifier, Reranker):
        with pytest.raises(headswap.HeadswapError, match=r"(?s)foo.*regression.*multi_label"):
            kind(folder)


# -- roles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["my-reranker", "reward-model", "embedder", "classifier", "llm"])
def test_one_label_has_every_role_of_a_score_whatever_its_folder_is_called(
    name: str, saved: Save, tmp_path: Path
) -> None:
    folder = saved("qwen3", 1)
    shutil.copytree(folder, tmp_path / name)
    answers = [Classifier(each).classify("w1 w2 w3") for each in (folder, tmp_path / name)]
    assert answers[0] == answers[1]
    chat = [{"role": "user", "content": "w1 w2 w3"}]
    assert roles(folder) == roles(tmp_path / name)
    template = "{query} {document}"
    ranked = [Reranker(each, template=template).rank("w1", DOCUMENTS)
              for each in (folder, tmp_path / name)]  # fmt: skip
    assert ranked[0] == ranked[1]
    reward = [RewardModel(each).reward(chat) for each in (folder, tmp_path / name)]
    assert reward[0] == reward[1]
    assert "embed" not in roles(tmp_path / name).offered
    with pytest.raises(headswap.ConversionError, match=r"It can: classify, score, reward\."):
        Embedder(tmp_path / name)


@pytest.mark.parametrize(("kind", "missing"), [
    (Reranker, "label_tokens="), (RewardModel, "label_tokens="),
])  # fmt: skip
def test_a_language_model_called_a_reranker_is_refused_with_what_it_can_do_and_lacks(
    kind: Any, missing: str, words: Any, tmp_path: Path
) -> None:
    tiny("qwen3").save_pretrained(tmp_path / "my-reranker-reward-model")
    own = words("xlm-roberta")
    own.chat_template = CHAT
    own.save_pretrained(tmp_path / "my-reranker-reward-model")
    with pytest.raises(headswap.HeadswapError, match=rf"generate, embed.*{missing}"):
        kind(tmp_path / "my-reranker-reward-model")


# -- crafted logits -------------------------------------------------------------------------------


@pytest.mark.parametrize("calibration", [
    {"mean": 1.0, "sigma": 2.0}, {"mean": 1.0, "scale": 0.5},
    {"logit_mean": 1.0, "logit_sigma": 2.0}, {"logit_bias": 1.0, "logit_scale": 0.5},
])  # fmt: skip
def test_a_logit_of_three_less_one_over_two_is_the_sigmoid_of_one(
    calibration: dict[str, float], words: Any
) -> None:
    model = crafted(words, 3.0)
    wanted = pytest.approx(torch.sigmoid(torch.tensor(1.0)).item(), abs=1e-6)
    (answer,) = Classifier(**model, calibration=calibration).classify("w1")
    assert (answer.score, answer.logits) == (wanted, [pytest.approx(3.0, abs=1e-6)])
    assert Reranker(**model).score("w1", "w2", calibration=calibration) == [wanted]
    (hit,) = Reranker(**model, calibration=calibration).rank("w1", ["w2"], activation="identity")
    assert (hit.score, hit.logit) == (pytest.approx(1.0), pytest.approx(3.0))
    half = Classifier(**model, calibration={"temperature": 0.5}, activation="identity")
    assert half.classify("w1")[0].score == pytest.approx(6.0)
    for wrong in ({**calibration, "temperature": 0}, {"sigma": 0}, {"logit_scale": 0}):
        with pytest.raises(headswap.ConversionError):
            Reranker(**model, calibration=wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_strong_logits_keep_three_different_probabilities_in_any_dtype(
    dtype: torch.dtype, words: Any
) -> None:
    model = headswap.as_seq_cls_model(tiny("qwen3"), label_tokens=[5, 6, 7]).to(dtype)
    own = words("ends")
    ids = [own("w1 w2")["input_ids"]]
    with torch.no_grad():
        states = model.model(input_ids=torch.tensor(ids))[0][0, -1].float()
        wanted = torch.tensor([12.0, 12.3, 12.6])
        rows = wanted[:, None] * states / states.square().sum()
        model.score.weight = torch.nn.Parameter(rows)  # fp32, as loading leaves it
    (found,) = Classifier(model, tokenizer=own, activation="sigmoid").classify("w1 w2")
    assert found.logits == pytest.approx(wanted.tolist(), abs=1e-3)
    scores = list(found.scores.values())
    assert len(set(scores)) == 3
    assert scores == pytest.approx(wanted.sigmoid().tolist(), abs=1e-6)
    assert max(scores) < 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_difference_of_two_tokens_is_taken_once_and_in_fp32(
    dtype: torch.dtype, words: Any, tmp_path: Path
) -> None:
    tiny("qwen3").to(dtype).save_pretrained(tmp_path)
    own = words("xlm-roberta")
    own.save_pretrained(tmp_path)
    reranker = Reranker(tmp_path, template="{query}</s>{document}", label_tokens=[7, 9],
                        method="difference", dtype=dtype)  # fmt: skip
    found = reranker.score("w1 w2", DOCUMENTS, activation="identity")
    rows = [row.ids for row in reranker.encode("w1 w2", DOCUMENTS)]
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    matrix = reference.lm_head.weight.float()
    with torch.no_grad():
        states = [reference.model(torch.tensor([row]))[0][0, -1].float() for row in rows]
    wanted = [float(state @ (matrix[9] - matrix[7])) for state in states]
    assert found == pytest.approx(wanted, abs=2e-2)  # the backbone's own batches differ by this
    alone_ = [reranker.score("w1 w2", each, activation="identity")[0] for each in DOCUMENTS]
    assert alone_ == pytest.approx(wanted, abs=1e-3)


# -- rewards --------------------------------------------------------------------------------------


def test_a_reward_follows_the_scale_of_the_last_hidden_state(words: Any) -> None:
    own = words("ends")
    own.chat_template = CHAT
    model = tiny("qwen3", SEQ, num_labels=1)
    model.config.problem_type = "regression"
    chats = [[{"role": "user", "content": text}] for text in ("w1 w2 w3", "w4")]
    rewards = RewardModel(model, tokenizer=own)
    before = rewards.reward(chats)
    wanted = alone(model, [row.ids for row in rewards.encode(chats)])
    assert wanted.shape == (2, 1)
    assert before == pytest.approx(wanted[:, 0].tolist(), abs=1e-5)
    with torch.no_grad():
        model.model.norm.weight *= 2
    assert rewards.reward(chats) == pytest.approx([2 * each for each in before], abs=1e-5)
    states = model.model(input_ids=torch.tensor([rewards.encode(chats)[0].ids]))[0]
    every = model.score(states)[0, :, 0].tolist()  # the head before the pooling
    assert rewards.token_rewards(chats)[0] == pytest.approx(every, abs=1e-5)


# -- other documents of a call --------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("model_type", ["bert", "qwen3"])
def test_a_documents_score_is_the_same_alone_in_company_and_in_a_ranking(
    model_type: str, labels: int, batch_size: int, saved: Save, sentence: Any
) -> None:
    template = {"qwen3": "w1 {query} w2 {document} w3"}.get(model_type, "auto")
    folder = saved(model_type, labels)
    relevance = None if labels == 1 else "LABEL_2"
    reranker = Reranker(folder, template=template, relevance=relevance, batch_size=batch_size)
    documents = [sentence(1 + 7 * n % 19, n) for n in range(9)]
    one = [reranker.score("w5 w6", [each])[0] for each in documents]
    assert len({round(score, 5) for score in one}) == 9
    for count in (2, 3, 9):
        found = reranker.score("w5 w6", documents[:count])
        assert found == pytest.approx(one[:count], abs=1e-5)
        hits = reranker.rank("w5 w6", documents[:count])
        assert [hit.score for hit in hits] == pytest.approx(
            [one[hit.index] for hit in hits], abs=1e-5
        )
        assert [hit.index for hit in hits] == sorted(range(count), key=lambda i: -one[i])
        assert [hit.document for hit in hits] == [documents[hit.index] for hit in hits]
        assert reranker.rank("w5 w6", documents[:count], top_n=2) == hits[:2]
        assert reranker.rank("w5 w6", documents[:count], top_n=99) == hits


@pytest.mark.parametrize("batch_size", [1, 2, 3, 32])
def test_equal_documents_stay_in_their_order_wherever_the_batches_end(
    batch_size: int, saved: Save
) -> None:
    reranker = Reranker(saved("bert", 1), batch_size=batch_size)
    documents = ["w5 w6", "w7", "w5 w6", "w8 w9 w10", "w7", "w5 w6"]
    hits = reranker.rank("w1", documents)
    assert sorted(hit.index for hit in hits) == list(range(6))
    for text, places in (("w5 w6", [0, 2, 5]), ("w7", [1, 4])):
        same = [hit for hit in hits if hit.document == text]
        assert [hit.index for hit in same] == places
        assert len({hit.score for hit in same}) == 1


@pytest.mark.parametrize(("queries", "documents"), [(2, 3), (3, 2), (0, 2), (2, 1), (3, 0)])
def test_other_numbers_of_queries_than_one_or_as_many_as_documents_are_refused(
    queries: int, documents: int, saved: Save
) -> None:
    reranker = Reranker(saved("bert", 1))
    with pytest.raises(headswap.InputError, match=f"{queries} queries and {documents} documents"):
        reranker.score(["w1"] * queries, ["w2"] * documents)


# -- one column -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Classifier, Reranker])
def test_one_column_is_never_soft_maxed_whoever_asks(kind: Any, words: Any) -> None:
    model = crafted(words, 3.0)
    answer = {Classifier: lambda m, **more: m.classify("w1", **more)[0].score,
              Reranker: lambda m, **more: m.score("w1", "w2", **more)[0]}[kind]  # fmt: skip
    with pytest.raises(headswap.ConversionError, match="over one label is always 1"):
        kind(**model, activation="softmax")
    made = kind(**model)
    with pytest.raises(headswap.ConversionError, match="over one label is always 1"):
        answer(made, activation="softmax")
    wanted = torch.sigmoid(torch.tensor(3.0)).item()
    assert answer(made) == pytest.approx(wanted, abs=1e-6)
    saved_: dict[str, Any] = {"function_to_apply": "softmax", "sentence_transformers": {
        "activation_fn": "torch.nn.modules.activation.Softmax"}}  # fmt: skip
    for field, value in saved_.items():
        setattr(model["source"].config, field, value)
        assert answer(kind(**model)) == pytest.approx(wanted, abs=1e-6)
