# SPDX-License-Identifier: Apache-2.0
"""Models as users hand them over: in use elsewhere, wrapped, or with labels that do not fit."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny_models import alone, tiny

import headswap
from headswap.text import Classifier
from headswap.text.encode import Encoder
from headswap.text.lengths import Limit

SEQ = "AutoModelForSequenceClassification"


def labelled(names: list[str], columns: int = 3, **label2id: int) -> Any:
    model = tiny("bert", SEQ, num_labels=columns)
    model.config.id2label = dict(enumerate(names))
    if label2id:
        model.config.label2id = label2id
    return model


def in_threads(work: Callable[[], None]) -> None:
    """Run `work` in eight threads that start together; the first error of any is raised."""
    start, errors = threading.Barrier(8), []

    def one() -> None:
        start.wait()
        try:
            work()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads that give way at almost every step, so that races show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


# -- labels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "names"), [(1, ["a", "b", "c"]), (3, ["a", "b"]), (2, ["a"])])
def test_logits_of_another_width_than_the_labels_are_refused(
    words: Any, columns: int, names: list[str]
) -> None:
    classifier = Classifier(labelled(names, columns), tokenizer=words("bert"))
    with pytest.raises(headswap.LabelError, match=rf"\[2, {columns}\].*{len(names)} labels"):
        classifier.classify(["w1", "w2"])


def test_two_columns_of_one_name_are_refused(words: Any) -> None:
    with pytest.raises(headswap.LabelError, match="called 'a'") as caught:
        Classifier(labelled(["a", "a", "c"]), tokenizer=words("bert"))
    assert caught.value.label == "a"  # type: ignore[attr-defined]


def test_a_label2id_that_says_otherwise_is_refused_by_name(words: Any) -> None:
    model = labelled(["a", "b", "c"], a=0, b=2, c=1)
    with pytest.raises(headswap.LabelError, match=r"'b' is column 1 in id2label and 2 in label2id"):
        Classifier(model, tokenizer=words("bert"))


def test_names_that_label2id_lacks_are_no_contradiction(words: Any) -> None:
    classifier = Classifier(labelled(["a", "b", "c"], x=0, a=0), tokenizer=words("bert"))
    assert classifier.labels == ("a", "b", "c")


# -- top_k ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [1, 2, 3, 9])
def test_top_k_keeps_the_best_scores_in_the_order_of_columns(words: Any, top_k: int) -> None:
    classifier = Classifier(tiny("bert", SEQ, num_labels=3), tokenizer=words("bert"))
    (whole,), (found,) = classifier.classify("w1"), classifier.classify("w1", top_k=top_k)
    wanted = sorted(whole.scores.values(), reverse=True)[:top_k]
    assert found.scores == {n: s for n, s in whole.scores.items() if s in wanted}
    assert list(found.scores) == [name for name in classifier.labels if name in found.scores]
    assert (found.label, found.score, found.logits) == (whole.label, whole.score, whole.logits)


@pytest.mark.parametrize("top_k", [0, -1])
def test_a_top_k_below_one_is_refused(words: Any, top_k: int) -> None:
    classifier = Classifier(tiny("bert", SEQ, num_labels=3), tokenizer=words("bert"))
    with pytest.raises(headswap.ConversionError, match=f"top_k={top_k}"):
        classifier.classify("w1", top_k=top_k)


# -- segments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("model_type", ["gpt2", "distilbert", "roberta", "llama", "bert"])
def test_segments_that_a_tokenizer_adds_by_itself_change_no_answer(
    words: Any, model_type: str, convert: bool
) -> None:
    # transformers 4.57 has token_type_ids among the inputs of a tokenizer that does not say.
    own = words("ends")
    own.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    extra = {"dim": 32, "n_layers": 2, "n_heads": 4} if model_type == "distilbert" else {}
    model = tiny(model_type, SEQ, num_labels=3, **extra)
    wanted = alone(model, [own("w1 w2 w3")["input_ids"]])[0].tolist()
    if convert and model_type != "distilbert":
        model = headswap.as_seq_cls_model(model)
    for template in (None, "{text}</s>"):
        (found,) = Classifier(model, tokenizer=own, template=template).classify("w1 w2 w3")
        assert found.logits == pytest.approx(wanted, abs=1e-5)


# -- wrapped models -------------------------------------------------------------------------------


class Wrapper(torch.nn.Module):
    """A user's own class: no `device`, no telling name."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.config = inner.config

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


@pytest.mark.parametrize("wrap", [Wrapper, lambda m: torch.compile(m, backend="eager")])
def test_a_wrapped_classifier_answers_as_the_one_inside(words: Any, wrap: Any) -> None:
    model = tiny("bert", SEQ, num_labels=3)
    texts = ["w1 w2", "w3", "w4 w5 w6"]
    wanted = Classifier(model, tokenizer=words("bert")).classify(texts)
    found = Classifier(wrap(model), tokenizer=words("bert")).classify(texts)
    for one, other in zip(found, wanted, strict=True):
        assert one.logits == pytest.approx(other.logits, abs=1e-5)


def test_a_wrapped_model_that_gives_no_labels_is_refused_by_its_logits(words: Any) -> None:
    classifier = Classifier(Wrapper(tiny("llama")), tokenizer=words("chat"))
    with pytest.raises(headswap.LabelError, match=r"logits of shape \[1, 3, 99\]"):
        classifier.classify("w1 w2")


def test_a_compiled_model_is_judged_by_the_one_inside(words: Any) -> None:
    with pytest.raises(headswap.ConversionError, match="LlamaForCausalLM gives no label"):
        Classifier(torch.compile(tiny("llama"), backend="eager"), tokenizer=words("chat"))


# -- threads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("classifiers", [1, 8])
def test_threads_that_share_a_model_in_training_mode_see_no_dropout(
    words: Any, classifiers: int
) -> None:
    model = tiny("bert", SEQ, num_labels=3, hidden_dropout_prob=0.5)
    ready = [Classifier(model, tokenizer=words("bert")) for _ in range(classifiers)]
    texts = ["w1 w2 w3"] * 4
    wanted = ready[0].classify(texts)
    model.train()
    model.bert.pooler.eval()  # frozen by its owner
    turns = iter(ready * 8)

    def work() -> None:
        mine = next(turns)
        for _ in range(30):
            assert mine.classify(texts) == wanted

    in_threads(work)
    assert model.training
    assert not model.bert.pooler.training


@pytest.mark.usefixtures("eager_threads")
@pytest.mark.parametrize("template", [None, "w1 {text} w2"])
def test_the_first_calls_at_once_set_no_state_on_a_tokenizer(
    words: Any, sentence: Any, template: str | None
) -> None:
    own = words("bert")
    own.backend_tokenizer.enable_truncation(6)
    texts = [sentence(n, n) for n in (1, 30, 4, 200)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = Encoder(own, Limit(9, "max_length"), template=template).encode(texts)
        for _ in range(100):
            fresh = Encoder(own, Limit(9, "max_length"), template=template)

            def work(fresh: Encoder = fresh) -> None:
                assert fresh.encode(texts) == wanted

            in_threads(work)
