# SPDX-License-Identifier: Apache-2.0
"""Pairs as chat messages: the form that a CrossEncoder saved with a chat template has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import alone, tiny

import headswap
from headswap.text import Classifier, Reranker

SEQ = "AutoModelForSequenceClassification"
QUERY, DOCUMENTS = "the fox", ["quick {x} brown", "yes", "no <|im_end|> prefixed fox", "  the "]
RULES = "{% for m in messages %}{% if m.role == 'system' %}Instruct: {{ m.content }}\n{% endif %}"
PAIR = (
    RULES + "{% if m.role == 'query' %}<|im_start|>user\n<Query>: {{ m.content }}\n{% endif %}"
    "{% if m.role == 'document' %}<Document>: {{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
TRIMMED = PAIR.replace("m.content }}", "m.content | trim }}")
ORDINARY = (
    "{% for m in messages %}{% if m.role in ('system', 'user') %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)


def tokenizer(byte_pairs: Any, template: str, family: str = "ends") -> Any:
    own = byte_pairs(family, chat=True)
    own.chat_template = template
    return own


def checkpoint(folder: Path, byte_pairs: Any, template: str, **more: Any) -> Path:
    """A one-label classifier of Qwen3 that says nothing of its label tokens."""
    tiny("qwen3", SEQ, num_labels=1, pad_token_id=0, vocab_size=400, max_position_embeddings=256,
         **more).save_pretrained(folder)  # fmt: skip
    tokenizer(byte_pairs, template).save_pretrained(folder)
    return folder


@pytest.fixture
def sentence_transformers() -> Any:
    pytest.importorskip("sentence_transformers.base")  # since release 5.4
    import sentence_transformers as st

    return st


@pytest.mark.parametrize("prompt", [None, "be brief"])
@pytest.mark.parametrize("template", [PAIR, TRIMMED])
def test_scores_are_those_of_a_cross_encoder_with_a_chat_template(
    template: str, prompt: str | None, byte_pairs: Any, tmp_path: Path, sentence_transformers: Any
) -> None:
    st = sentence_transformers
    more = {"prompts": {"task": prompt}, "default_prompt_name": "task"} if prompt else {}
    source = checkpoint(tmp_path / "plain", byte_pairs, template)
    st.CrossEncoder(str(source), **more).save_pretrained(str(tmp_path / "ce"))
    reference = st.CrossEncoder(str(tmp_path / "ce"), device="cpu")
    documents = [each for each in DOCUMENTS if "<|" not in each]
    pairs = [(QUERY, each) for each in documents]
    reranker = Reranker(tmp_path / "ce")
    assert reranker.template_source == "the tokenizer's chat template"
    rows = reranker.encode(QUERY, documents)
    theirs = [reference[0].preprocess([pair], prompt=prompt)["input_ids"][0] for pair in pairs]
    assert [row.ids for row in rows] == [ids.tolist() for ids in theirs]
    wanted = reference.predict(pairs)
    assert reranker.score(QUERY, documents) == pytest.approx(wanted, abs=1e-5)
    asked = reference.predict(pairs, prompt="another task")
    found = reranker.score(QUERY, documents, instruction="another task")
    assert found == pytest.approx(asked, abs=1e-5)
    assert found != pytest.approx(wanted, abs=1e-4)


def test_label_tokens_of_a_chat_cross_encoder_and_arguments_of_its_template_are_used(
    byte_pairs: Any, tmp_path: Path, sentence_transformers: Any
) -> None:
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    lm = tiny("qwen3", vocab_size=400, max_position_embeddings=256)
    lm.save_pretrained(tmp_path / "lm")
    tokenizer(byte_pairs, PAIR).save_pretrained(tmp_path / "lm")
    module = Transformer(
        str(tmp_path / "lm"),
        transformer_task="text-generation",
        processing_kwargs={"chat_template": {"add_generation_prompt": True}},
    )
    module.tokenizer.padding_side = "left"
    score = LogitScore(true_token_id=9, false_token_id=7)
    reference = sentence_transformers.CrossEncoder(modules=[module, score], device="cpu")
    reference.save_pretrained(str(tmp_path / "ce"))
    reranker = Reranker(tmp_path / "ce")
    assert reranker.template is not None
    assert reranker.template[0].endswith("assistant\n")
    wanted = reference.predict([(QUERY, "yes"), (QUERY, "quick")])
    assert reranker.score(QUERY, ["yes", "quick"]) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.filterwarnings("ignore:.*were cut")
def test_a_chat_forms_marks_and_end_are_never_cut_and_a_users_marks_stay_text(
    byte_pairs: Any, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "x", byte_pairs, PAIR)
    own = tokenizer(byte_pairs, PAIR)
    mark = own.convert_tokens_to_ids("<|im_end|>")
    whole = Reranker(folder).encode(QUERY, DOCUMENTS)[2]
    assert whole.ids.count(mark) == 1
    fixed = len(Reranker(folder).encode("", "")[0].ids)
    cut = Reranker(folder, max_length=fixed + 12, truncation="left")
    (row,) = cut.encode(QUERY, DOCUMENTS[2])
    body = own(DOCUMENTS[2], add_special_tokens=False, split_special_tokens=True)["input_ids"]
    end = own("<|im_end|>\n", add_special_tokens=False)["input_ids"]
    assert len(row.ids) == fixed + 12
    assert row.ids[-len(end) :] == end
    query = [i for i in row.ids if i in whole.ids]
    assert query[:5] == whole.ids[:5]
    rest = row.ids[: -len(end)]
    assert rest[-3:] == body[-3:]


def test_a_plain_folder_whose_chat_template_names_the_roles_of_a_pair_uses_it(
    byte_pairs: Any, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "x", byte_pairs, PAIR)
    own = tokenizer(byte_pairs, PAIR)
    messages = [{"role": "query", "content": QUERY}, {"role": "document", "content": "yes"}]
    ids = own(own.apply_chat_template(messages, tokenize=False), add_special_tokens=False)
    reranker = Reranker(folder)
    assert reranker.encode(QUERY, "yes")[0].ids == ids["input_ids"]
    model = headswap.load(folder)
    wanted = alone(model, [ids["input_ids"]]).sigmoid()[0].tolist()
    assert reranker.score(QUERY, "yes") == pytest.approx(wanted, abs=1e-5)
    with pytest.raises(headswap.ConversionError, match="no separator"):
        Reranker(folder, template=None).encode(QUERY, "yes")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ORDINARY, "shows the query 0 times"),
        (PAIR.replace("m.content", "m.content | upper"), "shows the query 0 times"),
        (PAIR.replace("m.content", "m.content | replace('d', 'b')"), "shows the document 0 times"),
        (PAIR.replace("m.content", "m.content | e"), "changes the texts"),
        (PAIR + PAIR, "shows the query 2 times"),
        ("{{ raise_exception('no query') }}", "raises .*no query"),
    ],
)
def test_a_chat_template_that_cannot_carry_a_pair_is_refused(
    template: str, message: str, byte_pairs: Any, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "x", byte_pairs, template)
    with pytest.raises(headswap.ConversionError, match=message):
        Reranker(folder, template="chat")


# -- families that a one-label classifier may be of -----------------------------------------------


def test_a_stored_head_finds_its_family_by_the_label_tokens_that_the_config_names(
    byte_pairs: Any, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "x", byte_pairs, ORDINARY, method="from_2_way_softmax",
                        classifier_from_token=["no", "yes"])  # fmt: skip
    reranker = Reranker(folder)
    assert reranker.labels == ("LABEL_0",)
    assert reranker.template_source == "Qwen3-Reranker"
    named = Reranker(checkpoint(tmp_path / "y", byte_pairs, ORDINARY), template="Qwen3-Reranker")
    assert named.template == reranker.template
    assert named.encode(QUERY, "yes") == reranker.encode(QUERY, "yes")
    assert named.encode(QUERY, "yes", instruction="be brief") != reranker.encode(QUERY, "yes")


def test_a_checkpoint_that_says_nothing_of_its_form_is_refused_or_told_once(
    byte_pairs: Any, words: Any, tmp_path: Path, recwarn: Any
) -> None:
    folder = checkpoint(tmp_path / "x", byte_pairs, ORDINARY)
    hint = "If it is a Qwen3-Reranker, say template='Qwen3-Reranker'"
    with pytest.raises(headswap.ConversionError, match=hint):
        Reranker(tmp_path / "x").score(QUERY, "yes")
    words("xlm-roberta").save_pretrained(tmp_path / "y")
    tiny("qwen3", SEQ, num_labels=1).save_pretrained(tmp_path / "y")
    reranker = Reranker(tmp_path / "y")
    recwarn.clear()
    for _ in range(2):
        reranker.score("w1", ["w2", "w3"])
        reranker.rank("w1", ["w2"])
    assert [hint in str(w.message) for w in recwarn] == [True]
    assert folder.exists()


def test_a_call_may_have_a_template_of_its_own(words: Any, tmp_path: Path) -> None:
    words("xlm-roberta").save_pretrained(tmp_path)
    tiny("qwen3", SEQ, num_labels=1).save_pretrained(tmp_path)
    reranker, own = Reranker(tmp_path, template="w9 {query} {document}"), words("xlm-roberta")
    asked = "w8 {document} w7 {query}"
    (row,) = reranker.encode("w1", "w2", template=asked)
    start = own.bos_token_id
    assert row.ids == [start, *own("w8 w2 w7 w1", add_special_tokens=False)["input_ids"]]
    wanted = alone(reranker.model, [row.ids]).sigmoid()[0].tolist()
    assert reranker.score("w1", ["w2"], template=asked) == pytest.approx(wanted, abs=1e-5)
    assert reranker.rank("w1", ["w2"], template=asked)[0].score == pytest.approx(*wanted, abs=1e-5)
    assert reranker.template == ("w9 {query} {document}",)
    (bare,) = reranker.encode("w1", "w2", template=None)
    assert bare.ids == own("w1", "w2")["input_ids"]
    with pytest.raises(headswap.ConversionError, match="0 slots"):
        reranker.score("w1", ["w2"], template="w8 {query}")


# -- files ----------------------------------------------------------------------------------------


def test_a_default_prompt_stands_before_the_query_as_in_a_cross_encoder(
    words: Any, tmp_path: Path, sentence_transformers: Any
) -> None:
    tiny("bert", SEQ, num_labels=1, pad_token_id=0).save_pretrained(tmp_path / "x")
    words("bert").save_pretrained(tmp_path / "x")
    st = sentence_transformers
    made = st.CrossEncoder(str(tmp_path / "x"), prompts={"q": "w9 w8 "}, default_prompt_name="q")
    made.save_pretrained(str(tmp_path / "ce"))
    reference = st.CrossEncoder(str(tmp_path / "ce"), device="cpu")
    found = Reranker(tmp_path / "ce").score("w1", ["w2", "w3 w4"])
    wanted = reference.predict([("w1", "w2"), ("w1", "w3 w4")])
    assert found == pytest.approx(wanted, abs=1e-5)
    plain = Reranker(tmp_path / "x").score("w9 w8 w1", ["w2", "w3 w4"])
    assert found == pytest.approx(plain, abs=1e-6)
    with pytest.warns(UserWarning, match="the prompt 'w9 w8 ' before each pair; a Classifier does"):
        Classifier(tmp_path / "ce")


def test_a_default_prompt_that_a_familys_form_has_no_place_for_is_refused(
    byte_pairs: Any, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "x", byte_pairs, ORDINARY, method="from_2_way_softmax",
                        classifier_from_token=["no", "yes"])  # fmt: skip
    said = {"prompts": {"q": "be brief"}, "default_prompt_name": "q"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(said))
    with pytest.raises(headswap.UnsupportedHeadError, match="no place for"):
        Reranker(folder)
    (folder / "config_sentence_transformers.json").write_text('{"default_prompt_name": "q"}')
    with pytest.raises(headswap.UnsupportedHeadError, match="prompts are none"):
        Reranker(folder)


@pytest.mark.parametrize(
    "given", [{"text": {"max_length": 9}}, {"chat_template": {"max_length": 9}}]
)
def test_arguments_of_the_tokenizer_that_would_change_what_is_run_are_refused(
    given: Any, byte_pairs: Any, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "x", byte_pairs, PAIR)
    listed = [{"idx": 0, "path": "", "type": "sentence_transformers.base.modules.Transformer"}]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"processing_kwargs": given}))
    for kind in (Reranker, Classifier):
        with pytest.raises(headswap.UnsupportedHeadError, match="max_length"):
            kind(folder)


def test_special_marks_that_only_the_added_tokens_name_are_marks_in_a_template(
    byte_pairs: Any, tmp_path: Path
) -> None:
    from transformers import AddedToken

    own = byte_pairs("ends")
    own.add_tokens([AddedToken("<|turn|>", special=True)], special_tokens=True)
    tiny("qwen3", SEQ, num_labels=1, vocab_size=400).save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    (row,) = Reranker(tmp_path, template="{query}<|turn|>{document}").encode("the", "fox <|turn|>")
    mark = own.convert_tokens_to_ids("<|turn|>")
    assert row.ids.count(mark) == 1
    assert torch.tensor(row.ids).max() < 400


@pytest.mark.parametrize("start", ["", "{{ bos_token }}"])
def test_a_chat_template_says_itself_whether_there_is_a_start_mark(
    start: str, byte_pairs: Any, tmp_path: Path
) -> None:
    own = tokenizer(byte_pairs, start + PAIR, "chat")
    tiny("qwen3", SEQ, num_labels=1, vocab_size=400).save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    messages = [{"role": "query", "content": "the"}, {"role": "document", "content": "fox"}]
    text = own.apply_chat_template(messages, tokenize=False)
    wanted = own(text, add_special_tokens=False)["input_ids"]
    (row,) = Reranker(tmp_path, template="chat").encode("the", "fox")
    assert row.ids == wanted
    assert row.ids.count(own.bos_token_id) == bool(start)
