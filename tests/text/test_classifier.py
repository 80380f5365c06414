# SPDX-License-Identifier: Apache-2.0
"""From texts to answers: ids equal the tokenizer's own, values a plain forward's."""

from __future__ import annotations

import json
import random
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import alone, tiny, word_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import headswap
from headswap.text import Classifier, Template, parse_template
from headswap.text.encode import Encoder, collate
from headswap.text.lengths import Limit, usable_length

SEQ = "AutoModelForSequenceClassification"
WORDS = [f"w{i}" for i in range(60)]


def tokenizer(kind: str, **more: Any) -> Any:
    """A word-level tokenizer that marks texts as a family does."""
    plain = ["<s>", "<pad>", "</s>", "<unk>"]
    marks = {"bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]"], "gpt2": plain[1:]}.get(kind, plain)
    chat = ["<|im_start|>", "<|im_end|>"]
    known = {word: i for i, word in enumerate([*marks, *chat, *WORDS])}
    inner = Tokenizer(models.WordLevel(known, unk_token="[UNK]" if kind == "bert" else "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    forms: dict[str, Any] = {
        "bert": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ["[CLS]", "[SEP]"]),
        "roberta": ("<s> $A </s>", "<s> $A </s> </s> $B </s>", ["<s>", "</s>"]),
        "llama": ("<s> $A", "<s> $A <s>:1 $B:1", ["<s>"]),
    }
    if kind in forms:
        single, pair, used = forms[kind]
        inner.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[(mark, known[mark]) for mark in used]
        )
    names = {"bert": {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]",
                      "pad_token": "[PAD]"},
             "roberta": {"cls_token": "<s>", "sep_token": "</s>", "bos_token": "<s>",
                         "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
             "llama": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
                       "pad_token": "<pad>"},
             "gpt2": {"eos_token": "</s>", "unk_token": "<unk>"}}[kind]  # fmt: skip
    types = ["input_ids", "token_type_ids", "attention_mask"] if kind == "bert" else [
        "input_ids", "attention_mask"]  # fmt: skip
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, model_input_names=types, additional_special_tokens=chat,
        **names, **more,
    )  # fmt: skip


def sentence(length: int, seed: int = 0) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=length))


def encoder(kind: str, limit: int | None = None, **more: Any) -> Encoder:
    return Encoder(tokenizer(kind), Limit(limit, "the test"), **more)


# -- ids ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*were cut")
@pytest.mark.parametrize("limit", [None, 8, 12])
@pytest.mark.parametrize("kind", ["bert", "roberta", "llama", "gpt2"])
def test_ids_are_the_tokenizers_own(kind: str, limit: int | None) -> None:
    texts = [sentence(n, n) for n in (3, 7, 20)]
    own = tokenizer(kind)(texts, truncation=limit is not None, max_length=limit)
    found = encoder(kind, limit).encode(texts)
    assert [row.ids for row in found] == own["input_ids"]
    assert [row.types for row in found] == own.get("token_type_ids", [None] * 3)
    assert [row.truncated for row in found] == [
        limit is not None and row.full > limit for row in found
    ]


@pytest.mark.filterwarnings("ignore:.*were cut")
@given(st.integers(1, 20), st.integers(1, 20), st.sampled_from(["bert", "roberta"]))
def test_pairs_are_cut_as_the_tokenizer_cuts_them(first: int, second: int, kind: str) -> None:
    pair = (sentence(first, 1), sentence(second, 2))
    own = tokenizer(kind)(*pair, truncation="longest_first", max_length=12)
    (found,) = encoder(kind, 12).encode([pair])
    assert found.ids == own["input_ids"]
    assert found.types == own.get("token_type_ids")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_pairs_without_a_separator_are_refused(kind: str) -> None:
    with pytest.raises(headswap.ConversionError, match="separator"):
        encoder(kind).encode([("w1", "w2")])


def test_a_cut_that_lies_in_the_tokenizers_file_is_not_applied_unseen() -> None:
    own = tokenizer("bert")
    own.backend_tokenizer.enable_truncation(6)
    found = Encoder(own, Limit(None, "nothing")).encode([sentence(20)])
    assert len(found[0].ids) == 22
    assert not found[0].truncated


def test_over_long_texts_are_refused_with_both_numbers_where_cutting_is_off() -> None:
    strict = encoder("bert", 8, truncation=False)
    with pytest.raises(headswap.InputError, match=r"Text 1 has 22 tokens.*limit is 8") as caught:
        strict.encode([sentence(3), sentence(20)])
    assert caught.value.rows == (1,)
    assert len(strict.encode([sentence(3)])[0].ids) == 5


def test_one_warning_counts_the_texts_that_were_cut() -> None:
    with pytest.warns(UserWarning, match=r"2 of 3 texts were cut to 8") as caught:
        encoder("bert", 8).encode([sentence(20), sentence(3), sentence(9)])
    assert len(caught) == 1


def test_a_text_without_tokens_is_named() -> None:
    with pytest.raises(headswap.InputError, match=r"\[1\]") as caught:
        encoder("gpt2").encode(["w1", ""])
    assert caught.value.rows == (1,)


@pytest.mark.parametrize("side", ["left", "right"])
def test_collate_pads_ids_mask_and_segments(side: str) -> None:
    rows = encoder("bert").encode([("w1", "w2 w3"), ("w4", "w5")])
    batch = collate(rows, pad_id=0, side=side)
    assert {t.shape for t in batch.values()} == {(2, 6)}
    pad = slice(0, 1) if side == "left" else slice(5, 6)
    assert batch["attention_mask"][1, pad].tolist() == [0]
    assert batch["token_type_ids"][1, pad].tolist() == [0]
    assert batch["attention_mask"].sum(1).tolist() == [6, 5]


# -- templates ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("template", "text"), [
    ("no slot", "0 slots"), ("{text} {text}", "2 slots"), ("{text} {query}", "query"),
    ("{text", "expected '}'"), ("{}", "variable"), ("{text!r}", "variable"),
])  # fmt: skip
def test_bad_templates_are_refused(template: str, text: str) -> None:
    with pytest.raises(headswap.ConversionError, match=text):
        parse_template(template)


def test_doubled_braces_are_literal() -> None:
    assert parse_template("a {{b}} {text} c") == ("a {b} ", " c")


@pytest.mark.parametrize("start", ["", "<s> "])
def test_prefix_body_and_suffix_are_encoded_apart_with_one_start_mark(start: str) -> None:
    own = tokenizer("llama")
    template = Template.compile(f"{start}<|im_start|> w1 {{text}} <|im_end|> w2", own)
    ids, full = template.encode("w3 <|im_end|> w4", None)
    plain = own.get_vocab()
    names = ["<s>", "<|im_start|>", "w1", "w3", "<unk>", "w4", "<|im_end|>", "w2"]
    if ids[4] == plain["<|im_end|>"]:  # a word-level tokenizer knows the mark as a word too
        names[4] = "<|im_end|>"
    assert ids == [plain[name] for name in names]
    assert full == len(ids)


def test_special_marks_in_a_users_text_stay_text() -> None:
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate("<|imend>_ ab")}, []))
    own = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, additional_special_tokens=["<|im_end|>"]
    )
    mark = own.convert_tokens_to_ids("<|im_end|>")
    template = Template.compile("a{text}<|im_end|>", own)
    ids, _ = template.encode("b<|im_end|>", None)
    assert ids.count(mark) == 1
    assert ids[-1] == mark
    assert len(ids) == 1 + len("b<|im_end|>") + 1
    assert own("<|im_end|>", add_special_tokens=False)["input_ids"] == [mark]


def test_cutting_shortens_the_text_and_never_the_fixed_parts() -> None:
    template = Template.compile("w1 w2 {text} w3 w4", tokenizer("llama"))
    full_ids, full = template.encode(sentence(50), None)
    ids, counted = template.encode(sentence(50), 24)
    assert counted == full == 55
    assert len(ids) == 24
    assert ids[:3] == full_ids[:3]
    assert ids[-2:] == full_ids[-2:]
    assert ids[3:-2] == full_ids[3 : 3 + 19]
    with pytest.raises(headswap.InputError, match=r"take 5 tokens.*limit is 5"):
        template.encode(sentence(50), 5)


# -- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model_type", "stored", "value", "source"), [
    ("bert", int(1e30), 64, "config.max_position_embeddings"),
    ("bert", 40, 40, "tokenizer.model_max_length"),
    ("roberta", int(1e30), 62, "config.max_position_embeddings - 2"),
    ("llama", 40, 64, "config.max_position_embeddings"),
    ("gpt2", int(1e30), 64, "config.max_position_embeddings"),
])  # fmt: skip
def test_the_smallest_real_limit_counts(
    model_type: str, stored: int, value: int, source: str
) -> None:
    model = tiny(model_type, SEQ, num_labels=2)
    found = usable_length(model, tokenizer("bert", model_max_length=stored))
    assert (found.value, found.source) == (value, source)


def test_a_text_at_the_limit_runs_and_one_beyond_is_cut() -> None:
    model = tiny("roberta", SEQ, num_labels=2)
    classifier = Classifier(model, tokenizer=tokenizer("roberta"))
    assert not classifier.classify(sentence(60))[0].truncated
    with pytest.warns(UserWarning, match="were cut"):
        assert classifier.classify(sentence(61))[0].truncated


@pytest.mark.parametrize("length", [0, 65])
def test_a_max_length_out_of_range_is_refused(length: int) -> None:
    model = tiny("llama", SEQ, num_labels=2)
    with pytest.raises(headswap.ConversionError, match="from 1 to 64"):
        Classifier(model, tokenizer=tokenizer("llama"), max_length=length)


# -- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3, 64])
@pytest.mark.parametrize("model_type", ["bert", "llama"])
def test_answers_come_in_order_and_equal_single_runs(model_type: str, batch_size: int) -> None:
    model = headswap.as_seq_cls_model(tiny(model_type, SEQ, num_labels=3))
    texts = [sentence(1 + n % 13, n) for n in range(20)]
    own = tokenizer(model_type)
    wanted = alone(model, [own(text)["input_ids"] for text in texts])
    converted = model if model_type == "bert" else headswap.as_seq_cls_model(model)
    found = Classifier(converted, tokenizer=own, batch_size=batch_size).classify(texts)
    got = torch.tensor([answer.logits for answer in found])
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)
    probabilities = wanted.softmax(-1)
    for answer, row in zip(found, probabilities, strict=True):
        assert answer.score == pytest.approx(float(row.max()), abs=1e-5)
        assert answer.label == f"LABEL_{int(row.argmax())}"
        assert json.loads(json.dumps(answer.to_dict()))["label"] == answer.label


def test_columns_follow_the_numbers_of_the_labels() -> None:
    model = tiny("llama", SEQ, num_labels=11)
    model.config.id2label = {i: f"n{i}" for i in (10, 2, 0, 9, 1, 3, 8, 4, 7, 5, 6)}
    (answer,) = Classifier(model, tokenizer=tokenizer("llama")).classify("w1")
    assert list(answer.scores) == [f"n{i}" for i in range(11)]


def test_an_activation_for_one_call_leaves_the_default() -> None:
    classifier = Classifier(tiny("llama", SEQ, num_labels=3), tokenizer=tokenizer("llama"))
    (raw,) = classifier.classify("w1 w2", activation="identity")
    (plain,) = classifier.classify("w1 w2")
    assert list(raw.scores.values()) == raw.logits == plain.logits
    assert sum(plain.scores.values()) == pytest.approx(1)
    assert (classifier.activation.name, classifier.activation.source) == ("softmax", "default")


def test_the_models_mode_is_put_back_and_progress_is_told() -> None:
    model = tiny("llama", SEQ, num_labels=2).train()
    seen: list[tuple[int, int]] = []
    Classifier(model, tokenizer=tokenizer("llama"), batch_size=2).classify(
        ["w1", "w2", "w3"], progress=lambda done, total: seen.append((done, total))
    )
    assert model.training
    assert seen == [(2, 3), (3, 3)]


def test_a_path_brings_its_tokenizer_and_its_template(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "lm")
    word_tokenizer().save_pretrained(tmp_path / "lm")
    headswap.convert_checkpoint(
        tmp_path / "lm", tmp_path / "out", label_tokens=["no", "yes"], template="good {text} w1"
    )
    classifier = Classifier(tmp_path / "out")
    assert classifier.template == "good {text} w1"
    (answer,) = classifier.classify("w5 w6")
    own = word_tokenizer()
    ids = own("good w5 w6 w1")["input_ids"]
    wanted = tiny("llama")(torch.tensor([ids])).logits[
        0, -1, own.convert_tokens_to_ids(["no", "yes"])
    ]
    assert answer.logits == pytest.approx(wanted.tolist(), abs=1e-5)
    (bare,) = Classifier(tmp_path / "out", template="{text}").classify("w5 w6")
    (none,) = Classifier(tmp_path / "out", template=None).classify("w5 w6")
    assert none.logits == pytest.approx(bare.logits, abs=1e-6)
    assert bare.tokens == 2


def test_a_model_needs_a_tokenizer_and_a_head() -> None:
    with pytest.raises(headswap.ConversionError, match="tokenizer="):
        Classifier(tiny("llama", SEQ, num_labels=2))


def test_a_causal_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(headswap.MissingHeadError, match=r"score\.weight"):
        Classifier(tmp_path)


def test_threads_give_what_one_thread_gives() -> None:
    classifier = Classifier(
        tiny("bert", SEQ, num_labels=3), tokenizer=tokenizer("bert"), max_length=8
    )
    texts = [sentence(1 + n % 12, n) for n in range(40)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        serial = [classifier.classify(text)[0].logits for text in texts]
        found: dict[int, list[list[float]]] = {}

        def work(number: int) -> None:
            found[number] = [classifier.classify(text)[0].logits for text in texts]

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(found[n] == serial for n in range(8))


def test_a_stored_template_for_pairs_takes_pairs(tmp_path: Path) -> None:
    from headswap.text import Reranker, roles

    tiny("llama").save_pretrained(tmp_path / "lm")
    tokenizer("llama").save_pretrained(tmp_path / "lm")
    headswap.convert_checkpoint(
        tmp_path / "lm", tmp_path / "out", label_tokens=[7, 9], method="difference",
        template="w1 {query} w2 {document} w3",
    )  # fmt: skip
    assert "classify" in roles(tmp_path / "out").offered
    classifier, reranker = Classifier(tmp_path / "out"), Reranker(tmp_path / "out")
    (found,) = classifier.classify([("w5", "w6 w7")])
    assert classifier.encode([("w5", "w6 w7")]) == reranker.encode("w5", ["w6 w7"])
    assert [found.score] == pytest.approx(reranker.score("w5", ["w6 w7"]), abs=1e-6)
    with pytest.raises(headswap.ConversionError, match="takes pairs"):
        classifier.classify("w5")
    with pytest.raises(headswap.ConversionError, match="a Reranker does"):
        Classifier(tmp_path / "out", template="{instruction} {query} {document}")
