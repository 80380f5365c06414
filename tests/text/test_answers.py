# SPDX-License-Identifier: Apache-2.0
"""Answers of a classifier: values, order, labels, modes, threads, and what is refused."""

from __future__ import annotations

import json
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import alone, tiny, word_tokenizer

import headswap
from headswap.text import Answer, Classifier

SEQ = "AutoModelForSequenceClassification"
FAMILY = {"bert": "bert", "roberta": "xlm-roberta", "llama": "chat", "gpt2": "ends"}


@pytest.fixture(scope="module")
def model_of() -> Any:
    """`model_of(model_type)`: a three-label model, made once; decoders are converted ones."""
    made: dict[str, Any] = {}

    def one(model_type: str) -> Any:
        if model_type not in made and model_type in ("llama", "gpt2"):
            made[model_type] = headswap.as_seq_cls_model(tiny(model_type), label_tokens=[5, 6, 7])
        elif model_type not in made:
            made[model_type] = tiny(model_type, SEQ, num_labels=3)
        return made[model_type]

    return one


@pytest.fixture(scope="module")
def classifier_of(model_of: Any, words: Any) -> Any:
    """`classifier_of(model_type, **options)` over the model and the tokenizer of its family."""
    return lambda model_type, **options: Classifier(
        model_of(model_type), tokenizer=words(FAMILY[model_type]), **options
    )


def logits_of(answers: list[Answer]) -> torch.Tensor:
    return torch.tensor([answer.logits for answer in answers])


# -- values and order -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lone(classifier_of: Any, sentence: Any) -> Any:
    """`lone(model_type)`: 24 texts of mixed length, their ids, and the logits of each alone."""
    made: dict[str, Any] = {}

    def one(model_type: str) -> Any:
        if model_type not in made:
            classifier = classifier_of(model_type)
            texts = [sentence(1 + 7 * n % 24, n) for n in range(24)]
            ids = [row.ids for row in classifier.encode(texts)]
            made[model_type] = texts, ids, alone(classifier.model, ids)
        return made[model_type]

    return one


@settings(max_examples=8)
@given(st.lists(st.integers(0, 23), min_size=1, max_size=70), st.integers(1, 80))
@pytest.mark.parametrize("model_type", ["bert", "gpt2"])
def test_answers_come_in_order_and_equal_each_text_alone(
    classifier_of: Any, lone: Any, model_type: str, chosen: list[int], batch_size: int
) -> None:
    texts, ids, logits = lone(model_type)
    classifier = classifier_of(model_type, batch_size=batch_size)
    found = classifier.classify([texts[n] for n in chosen])
    wanted = logits[chosen]
    torch.testing.assert_close(logits_of(found), wanted, atol=1e-5, rtol=0)
    scores = torch.tensor([list(answer.scores.values()) for answer in found])
    torch.testing.assert_close(scores, wanted.softmax(-1), atol=1e-5, rtol=0)
    assert [answer.tokens for answer in found] == [len(ids[n]) for n in chosen]
    assert not any(answer.truncated for answer in found)


@pytest.mark.parametrize(("count", "batch_size"), [(1, 5), (24, 1), (24, 5), (70, 16), (70, 70)])
@pytest.mark.parametrize("model_type", ["roberta", "llama"])
def test_neither_count_nor_batch_size_changes_an_answer(
    classifier_of: Any, lone: Any, model_type: str, count: int, batch_size: int
) -> None:
    texts, _, logits = lone(model_type)
    chosen = [5 * n % 24 for n in range(count)]
    found = classifier_of(model_type, batch_size=batch_size).classify([texts[n] for n in chosen])
    torch.testing.assert_close(logits_of(found), logits[chosen], atol=1e-5, rtol=0)


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
def test_pairs_equal_the_models_own_call(
    classifier_of: Any, words: Any, sentence: Any, model_type: str
) -> None:
    pairs = [(sentence(2 + n, n), sentence(9 - n, 50 + n)) for n in range(7)]
    classifier = classifier_of(model_type, batch_size=3)
    found = classifier.classify(pairs)
    own = words(FAMILY[model_type])
    with torch.no_grad():
        wanted = [classifier.model(**own(a, b, return_tensors="pt")).logits for a, b in pairs]
    torch.testing.assert_close(logits_of(found), torch.cat(wanted), atol=1e-5, rtol=0)


def test_equal_texts_get_equal_answers_wherever_they_stand(classifier_of: Any) -> None:
    found = classifier_of("llama", batch_size=2).classify(["w1 w2", "w3", "w1 w2", "w3 w4 w5"])
    assert found[0].logits == pytest.approx(found[2].logits, abs=1e-6)
    assert found[0].label == found[2].label


def test_one_text_is_a_list_of_one_and_no_texts_are_none(classifier_of: Any) -> None:
    classifier = classifier_of("llama")
    (one,) = classifier.classify("w1 w2")
    assert classifier.classify(["w1 w2"]) == [one]
    assert classifier.classify([]) == []


def test_any_sequence_of_texts_will_do(classifier_of: Any) -> None:
    classifier = classifier_of("llama")
    wanted = classifier.classify(["w1", "w2"])
    assert classifier.classify(("w1", "w2")) == wanted
    assert classifier.classify(text for text in ("w1", "w2")) == wanted


@pytest.mark.parametrize("pad", [1, 98, None])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_stock_decoder_answers_alike_whatever_pad_id_its_config_has(
    words: Any, model_type: str, pad: int | None
) -> None:
    model = tiny(model_type, SEQ, num_labels=3)
    model.config.pad_token_id = pad
    classifier = Classifier(model, tokenizer=words("chat"))  # pads with 1
    texts = ["w1", "w2 w3 w4 w5", "w6 w7"]
    together = logits_of(classifier.classify(texts))
    single = logits_of([classifier.classify(text)[0] for text in texts])
    torch.testing.assert_close(together, single, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_size_below_one_is_refused(classifier_of: Any, size: int) -> None:
    with pytest.raises(headswap.HeadswapError, match=f"batch_size={size}"):
        classifier_of("llama", batch_size=size).classify(["w1", "w2"])


def test_a_bf16_backbone_still_answers_in_fp32(words: Any) -> None:
    model = headswap.as_seq_cls_model(tiny("llama"), label_tokens=[5, 6, 7]).bfloat16()
    (found,) = Classifier(model, tokenizer=words("chat")).classify("w1 w2 w3")
    rounded = torch.tensor(found.logits).bfloat16().float().tolist()
    assert found.logits != rounded  # the head ran in fp32 on the backbone's rows
    assert sum(found.scores.values()) == pytest.approx(1, abs=1e-6)


# -- labels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [
    list(range(11)), [10, 2, 0, 9, 1, 3, 8, 4, 7, 5, 6], [str(n) for n in (10, 1, 2, 0, 9, 3)],
])  # fmt: skip
def test_names_stand_on_the_columns_of_their_numbers(words: Any, keys: list[Any]) -> None:
    model = tiny("llama", SEQ, num_labels=len(keys))
    order = {key: rank for rank, key in enumerate(sorted(keys, key=int))}
    model.config.id2label = {key: f"n{order[key]}" for key in keys}
    classifier = Classifier(model, tokenizer=words("chat"))
    (found,) = classifier.classify("w1 w2")
    wanted = alone(model, [[0, 5, 6]])[0]
    assert list(found.scores) == [f"n{n}" for n in range(len(keys))]
    assert list(found.scores.values()) == pytest.approx(wanted.softmax(-1).tolist(), abs=1e-6)
    assert found.label == f"n{int(wanted.argmax())}"


def test_an_answer_is_json(classifier_of: Any) -> None:
    (found,) = classifier_of("bert").classify("w1 w2")
    value = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert set(value) == {"label", "score", "scores", "logits", "tokens", "truncated"}
    assert Answer(**value) == found
    assert value["score"] == value["scores"][value["label"]] == max(value["scores"].values())
    assert (value["tokens"], value["truncated"]) == (4, False)
    assert list(value["scores"]) == ["LABEL_0", "LABEL_1", "LABEL_2"]


# -- activations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "formula"), [
    ("identity", lambda z: z), ("sigmoid", torch.sigmoid), ("softmax", lambda z: z.softmax(-1)),
])  # fmt: skip
def test_an_activation_holds_for_its_call_alone(
    classifier_of: Any, name: str, formula: Any
) -> None:
    classifier = classifier_of("llama")
    before = classifier.classify(["w1 w2", "w3"])
    asked = classifier.classify(["w1 w2", "w3"], activation=name)
    scores = torch.tensor([list(answer.scores.values()) for answer in asked])
    torch.testing.assert_close(scores, formula(logits_of(before)), atol=1e-6, rtol=0)
    assert classifier.classify(["w1 w2", "w3"]) == before
    assert (classifier.activation.name, classifier.activation.source) == ("softmax", "default")


def test_an_activation_of_the_classifier_holds_until_a_call_says_otherwise(
    classifier_of: Any,
) -> None:
    classifier = classifier_of("llama", activation="sigmoid")
    assert classifier.activation.source == "call"
    (found,) = classifier.classify("w1")
    assert list(found.scores.values()) == pytest.approx(
        torch.tensor(found.logits).sigmoid().tolist()
    )
    (raw,) = classifier.classify("w1", activation="identity")
    assert list(raw.scores.values()) == raw.logits


@pytest.mark.parametrize(("problem", "labels", "formula"), [
    ("regression", 3, lambda z: z), ("regression", 1, lambda z: z), (None, 1, torch.sigmoid),
    ("multi_label_classification", 3, torch.sigmoid),
    ("single_label_classification", 3, lambda z: z.softmax(-1)),
])  # fmt: skip
def test_a_models_problem_type_decides_by_any_route(
    words: Any, problem: str | None, labels: int, formula: Any
) -> None:
    plain = tiny("llama", SEQ, num_labels=labels)
    plain.config.problem_type = problem
    wanted = alone(plain, [[0, 5, 6]])[0]
    for model in (plain, headswap.as_seq_cls_model(plain)):
        (found,) = Classifier(model, tokenizer=words("chat")).classify("w1 w2")
        assert found.logits == pytest.approx(wanted.tolist(), abs=1e-5)
        assert list(found.scores.values()) == pytest.approx(formula(wanted).tolist(), abs=1e-5)


def test_a_reward_model_answers_with_its_raw_value(words: Any, tmp_path: Path) -> None:
    stock = tiny("qwen3", SEQ, num_labels=1)
    stock.save_pretrained(tmp_path)
    classifier = Classifier(tmp_path, task="reward", tokenizer=words("chat"))
    (found,) = classifier.classify("w1 w2")
    assert classifier.activation.name == "identity"
    assert found.score == found.logits[0] == pytest.approx(alone(stock, [[0, 5, 6]]).item())


def test_an_unknown_activation_is_refused_before_any_text_is_read(classifier_of: Any) -> None:
    classifier = classifier_of("llama")
    with pytest.raises(headswap.ConversionError, match="softmax, sigmoid, identity"):
        classifier.classify([None], activation="tanh")


# -- the model's mode -----------------------------------------------------------------------------


@pytest.fixture
def dropping(words: Any) -> Classifier:
    """A classifier whose model, in training mode, drops half of everything."""
    model = tiny("bert", SEQ, num_labels=3, hidden_dropout_prob=0.5)
    return Classifier(model, tokenizer=words("bert"))


@pytest.mark.parametrize("training", [True, False])
def test_the_models_mode_is_put_back_and_no_dropout_acts(
    dropping: Classifier, training: bool
) -> None:
    (wanted,) = dropping.classify("w1 w2 w3")
    dropping.model.train(training)
    (found,) = dropping.classify("w1 w2 w3")
    assert found == wanted
    assert dropping.model.training is training


def test_the_mode_is_put_back_after_an_error(dropping: Classifier) -> None:
    dropping.model.train()

    def stop(done: int, total: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        dropping.classify(["w1"], progress=stop)
    assert dropping.model.training


def test_a_part_that_was_frozen_in_eval_mode_stays_so(dropping: Classifier) -> None:
    model = dropping.model.train()
    model.bert.eval()
    dropping.classify("w1")
    assert model.training
    assert not model.bert.training
    assert not any(module.training for module in model.bert.modules())


def test_no_graph_is_kept_and_progress_reaches_the_total(classifier_of: Any) -> None:
    classifier = classifier_of("llama", batch_size=4)
    seen: list[tuple[int, int]] = []
    classifier.classify([f"w{n}" for n in range(10)], progress=lambda *step: seen.append(step))
    assert seen == [(4, 10), (8, 10), (10, 10)]
    assert all(parameter.grad is None for parameter in classifier.model.parameters())


# -- warnings -------------------------------------------------------------------------------------


def test_a_cut_is_warned_of_once_and_marked_on_its_answer(
    classifier_of: Any, sentence: Any
) -> None:
    classifier = classifier_of("bert", max_length=10, batch_size=1)
    with pytest.warns(UserWarning, match=r"2 of 3 texts were cut to 10 tokens") as caught:
        found = classifier.classify([sentence(20, 0), sentence(3, 1), sentence(9, 2)])
    assert len(caught) == 1
    assert [answer.truncated for answer in found] == [True, False, True]
    assert [answer.tokens for answer in found] == [10, 5, 10]


def test_the_warning_points_to_the_callers_line(classifier_of: Any, sentence: Any) -> None:
    classifier = classifier_of("bert", max_length=10)
    with pytest.warns(UserWarning, match="were cut") as caught:
        classifier.classify(sentence(20, 0))
    assert caught[0].filename == __file__


# -- paths ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal checkpoint made into a classifier with a template."""
    folder = tmp_path_factory.mktemp("paths")
    tiny("llama").save_pretrained(folder / "lm")
    word_tokenizer().save_pretrained(folder / "lm")
    headswap.convert_checkpoint(
        folder / "lm", folder / "out", label_tokens=["no", "yes"], template="good {text} w1"
    )
    return folder


def test_a_path_brings_its_template(converted: Path) -> None:
    classifier = Classifier(converted / "out")
    assert classifier.template == "good {text} w1"
    own = word_tokenizer()
    (row,) = classifier.encode(["w5 w6"])
    assert row.ids == own("good w5 w6 w1")["input_ids"]
    (found,) = classifier.classify("w5 w6")
    lm, labels = tiny("llama"), own.convert_tokens_to_ids(["no", "yes"])
    with torch.no_grad():
        wanted = lm(torch.tensor([row.ids])).logits[0, -1, labels]
    assert found.logits == pytest.approx(wanted.tolist(), abs=1e-5)
    assert list(found.scores) == ["no", "yes"]
    assert list(found.scores.values()) == pytest.approx(wanted.softmax(-1).tolist(), abs=1e-5)


def test_a_template_of_the_call_stands_before_the_stored_one(converted: Path) -> None:
    classifier = Classifier(converted / "out", template="{text} w3")
    assert classifier.template == "{text} w3"
    assert classifier.encode(["w5"])[0].ids == word_tokenizer()("w5 w3")["input_ids"]


def test_a_path_as_a_string_and_a_loaded_model_give_the_same(converted: Path) -> None:
    (by_path,) = Classifier(str(converted / "out")).classify("w5 w6")
    model = headswap.load(converted / "out")
    loaded = Classifier(model, tokenizer=word_tokenizer())
    assert loaded.template == "good {text} w1"
    assert loaded.classify("w5 w6")[0].logits == pytest.approx(by_path.logits, abs=1e-6)


def test_options_of_loading_go_through_a_path(converted: Path) -> None:
    classifier = Classifier(
        converted / "lm", label_tokens=["no", "yes"], method="difference", dtype=torch.bfloat16
    )
    assert classifier.labels == ("yes",)
    assert next(classifier.model.backbone.parameters()).dtype == torch.bfloat16
    (found,) = classifier.classify("w5")
    assert found.score == pytest.approx(torch.tensor(found.logits[0]).sigmoid().item())


def test_two_labels_and_their_difference_answer_alike(converted: Path) -> None:
    two = Classifier(converted / "lm", label_tokens=["no", "yes"])
    one = Classifier(converted / "lm", label_tokens=["no", "yes"], method="difference")
    for text in ("w5", "w6 w7 w8", "good w9"):
        (pair,), (single,) = two.classify(text), one.classify(text)
        assert pair.scores["yes"] == pytest.approx(single.scores["yes"], abs=1e-6)


# -- refusals -------------------------------------------------------------------------------------


def test_a_causal_checkpoint_without_a_head_is_refused(converted: Path) -> None:
    with pytest.raises(headswap.MissingHeadError, match=r"score\.weight"):
        Classifier(converted / "lm")


def test_an_embedder_is_refused_by_its_task(converted: Path) -> None:
    with pytest.raises(headswap.ConversionError, match=r"no label for a text.*task='classify'"):
        Classifier(converted / "lm", task="embed")


def test_a_loaded_model_needs_a_tokenizer(model_of: Any) -> None:
    with pytest.raises(headswap.ConversionError, match="needs tokenizer="):
        Classifier(model_of("llama"))


def test_options_of_loading_are_refused_for_a_loaded_model(model_of: Any, words: Any) -> None:
    with pytest.raises(headswap.ConversionError, match=r"dtype.*loaded already"):
        Classifier(model_of("llama"), tokenizer=words("chat"), dtype=torch.bfloat16)


@pytest.mark.parametrize("form", ["embed", "causal"])
def test_a_loaded_model_that_is_no_classifier_is_refused(words: Any, form: str) -> None:
    model = tiny("llama")
    if form == "embed":
        model = headswap.as_embedding_model(model)
    with pytest.raises(headswap.ConversionError, match="classif"):
        Classifier(model, tokenizer=words("chat"))


# -- threads --------------------------------------------------------------------------------------


def test_eight_threads_with_fifty_calls_each_equal_one_thread(
    classifier_of: Any, sentence: Any
) -> None:
    classifier = classifier_of("roberta", max_length=9)
    calls = [[sentence(1 + (n + k) % 12, n + k) for k in range(1 + n % 3)] for n in range(50)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        serial = [classifier.classify(texts) for texts in calls]
        start = threading.Barrier(8)

        def work(_: int) -> list[list[Answer]]:
            start.wait()
            return [classifier.classify(texts) for texts in calls]

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(work, range(8)))
    assert found == [serial] * 8


def test_the_first_calls_of_many_threads_at_once_equal_one_thread(
    words: Any, model_of: Any, sentence: Any
) -> None:
    texts = [sentence(n, n) for n in (1, 30, 4, 12)]
    own = words("bert")
    own.backend_tokenizer.enable_truncation(6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = Classifier(model_of("bert"), tokenizer=own, max_length=9).classify(texts)
        for _ in range(10):
            fresh = Classifier(model_of("bert"), tokenizer=own, max_length=9)
            start = threading.Barrier(8)

            def work(_: int, fresh: Any = fresh, start: Any = start) -> list[Answer]:
                start.wait()
                found: list[Answer] = fresh.classify(texts)
                return found

            with ThreadPoolExecutor(8) as pool:
                assert list(pool.map(work, range(8))) == [wanted] * 8
