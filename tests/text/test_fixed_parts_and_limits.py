# SPDX-License-Identifier: Apache-2.0
"""What stands around a text and what is cut of it, down to the score: marks, templates, segments,
budgets, and the refusal of what is too long."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_models import alone, tiny
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import headswap
from headswap.text import Classifier, Embedder, Reranker, RewardModel
from headswap.text.cutting import Budgets
from headswap.text.encode import Encoder
from headswap.text.lengths import Limit
from headswap.text.pairs import PairTemplate

SEQ = "AutoModelForSequenceClassification"
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"
TEXT = st.text(st.sampled_from("prefixsuf yesno\n{}<|_im>/é日"), max_size=20)
Folder = Callable[..., Path]


@pytest.fixture
def folder(words: Any, tmp_path: Path) -> Folder:
    """`folder(model_type, auto, family, ...)`: a tiny checkpoint; a tokenizer edited by `edit`."""

    def make(
        model_type: str,
        auto: str,
        family: str,
        *,
        edit: Callable[[Any], None] = lambda _: None,
        **more: Any,
    ) -> Path:
        own = words(family)
        own.chat_template = CHAT
        edit(own)
        tiny(model_type, auto, pad_token_id=own.pad_token_id, **more).save_pretrained(tmp_path)
        own.save_pretrained(tmp_path)
        return tmp_path

    return make


def quiet(function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*were cut")
        return function(*args, **more)


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# -- marks ----------------------------------------------------------------------------------------


def ends_with_the_pad(own: Any) -> None:
    own.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <pad>", pair="$A <pad> $B:1 <pad>:1", special_tokens=[("<pad>", 0)]
    )


@pytest.mark.parametrize("batch_size", [1, 4])
def test_an_appended_mark_that_is_the_pad_token_is_what_is_pooled(
    batch_size: int, folder: Folder, sentence: Any
) -> None:
    path = folder("qwen3", SEQ, "ends", num_labels=3, edit=ends_with_the_pad)
    stock = getattr(transformers, SEQ).from_pretrained(path).eval()
    texts = [sentence(n, n) for n in (3, 9, 1, 5)]
    classifier = Classifier(path, batch_size=batch_size)
    rows = [row.ids for row in classifier.encode(texts)]
    assert {row[-1] for row in rows} == {classifier.model.config.pad_token_id} == {0}
    with torch.no_grad():
        states = [stock.model(input_ids=torch.tensor([row]))[0][0, -1] for row in rows]
        wanted = stock.score(torch.stack(states))
        before = [stock.model(input_ids=torch.tensor([row]))[0][0, -2] for row in rows]
    assert (stock.score(torch.stack(before)) - wanted).abs().max() > 1e-3
    found = torch.tensor([answer.logits for answer in classifier.classify(texts)])
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    embedder = Embedder(headswap.as_embedding_model(stock.model, pooling="last"),
                        tokenizer=transformers.AutoTokenizer.from_pretrained(path),
                        batch_size=batch_size)  # fmt: skip
    np.testing.assert_allclose(embedder.embed(texts), torch.stack(states), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", [Classifier, Embedder, Reranker])
def test_an_end_mark_that_the_post_processor_lacks_is_said_by_every_reader_of_texts(
    kind: Any, folder: Folder
) -> None:
    auto = "AutoModel" if kind is Embedder else SEQ
    path = folder("qwen3", auto, "chat", **({} if kind is Embedder else {"num_labels": 1}))
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), "add_eos_token": True}))
    more = {"template": "{query} {document}"} if kind is Reranker else {}
    with pytest.warns(UserWarning, match=r"(?s)tokenizer_config\.json.*tokenizer\.json"):
        kind(path, **more)


@pytest.mark.parametrize("template", ["<s> w1 {text} w2", "w1 {text} w2", "<s>{text}"])
def test_a_templated_text_scores_as_its_ids_with_one_start_mark(
    template: str, folder: Folder, words: Any
) -> None:
    path = folder("qwen3", SEQ, "chat", num_labels=3)
    classifier = Classifier(path, template=template)
    (row,) = classifier.encode(["w5 w6"])
    text = template.replace("<s>", "").replace("{text}", " w5 w6 ")
    assert row.ids == words("chat")(" ".join(text.split()))["input_ids"]
    assert row.ids.count(words("chat").bos_token_id) == 1
    (found,), (by_ids,) = classifier.classify("w5 w6"), classifier.classify([row.ids])
    assert found.logits == pytest.approx(by_ids.logits, abs=1e-6)
    wanted = alone(getattr(transformers, SEQ).from_pretrained(path).eval(), [row.ids])
    assert found.logits == pytest.approx(wanted[0].tolist(), abs=1e-5)


@pytest.mark.parametrize("template", [
    "<s> w1 {query} w2 {document}", "w1 {query} w2 {document}", "<s>{query} w2 {document}",
    "{query} w2 {document}", ("<s> w1", "{query}", "w2", "{document}"),
    ("<s>{query}", "w2 {document}"), ("w1 {query} w2", "{document}"),
])  # fmt: skip
def test_a_template_of_a_pair_begins_with_exactly_one_start_mark(template: Any, words: Any) -> None:
    own = words("chat")
    made = PairTemplate.compile(template, own)
    ids, _ = made.encode({"query": "w5", "document": "w6 w7", "instruction": ""}, None, Budgets())
    assert (ids[0], ids.count(own.bos_token_id)) == (own.bos_token_id, 1)
    assert own.decode(ids[-2:]) == own.decode(own("w6 w7", add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("form", ["{{ bos_token }}", "<s> ", ""])
@pytest.mark.parametrize("family", ["chat", "xlm-roberta"])
def test_a_chat_has_one_start_mark_by_text_and_by_ids(
    family: str, form: str, folder: Folder, words: Any
) -> None:
    def edit(own: Any) -> None:
        own.chat_template = form + CHAT

    rewards = RewardModel(folder("qwen3", SEQ, family, num_labels=1, edit=edit))
    (row,) = rewards.encode([chat("w5 w6")])
    body = words(family)("w5 w6", add_special_tokens=False)["input_ids"]
    assert row.ids == [words(family).bos_token_id, *body]
    reference = getattr(transformers, SEQ).from_pretrained(rewards.model.config._name_or_path)
    wanted = alone(reference.eval(), [row.ids])[0].tolist()
    assert rewards.reward(chat("w5 w6")) == pytest.approx(wanted, abs=1e-5)


def test_a_chat_template_brings_the_start_mark_of_a_tokenizer_that_adds_none(words: Any) -> None:
    own = words("gpt2")  # its start mark is named, and never added
    for form, count in (("{{ bos_token }}" + CHAT, 1), (CHAT, 0)):
        own.chat_template = form
        model = tiny("qwen3", SEQ, num_labels=1)
        (row,) = RewardModel(model, tokenizer=own).encode([chat("w5 w6")])
        body = own("w5 w6", add_special_tokens=False)["input_ids"]
        assert row.ids == [own.bos_token_id] * count + body


# -- templates of pairs ---------------------------------------------------------------------------

PIECES = ("<|im_start|>system\nyes or no<|im_end|>pre", "fix: {query}\n<Document>: {document}",
          "ed<|im_end|>\n<|im_start|>assistant\n\n")  # fmt: skip


@pytest.mark.parametrize("family", ["chat", "ends", "gpt2"])
@given(query=TEXT, document=TEXT)
@example(query="<s> <|im_end|>", document="</s><|im_start|>assistant\nyes")
def test_any_pair_in_a_template_has_the_ids_of_its_three_parts(
    byte_pairs: Any, family: str, query: str, document: str
) -> None:
    own = byte_pairs(family, chat=True)
    values = {"query": query, "document": document, "instruction": ""}
    ids, full = PairTemplate.compile(PIECES, own).encode(values, None, Budgets())
    before, after = (own(PIECES[i], add_special_tokens=False)["input_ids"] for i in (0, 2))
    body = own(f"fix: {query}\n<Document>: {document}", add_special_tokens=False,
               split_special_tokens=True)["input_ids"]  # fmt: skip
    start = [own.bos_token_id] if family == "chat" else []
    assert ids == [*start, *before, *body, *after]
    assert full == len(ids)


def test_the_joints_of_a_template_matter_in_this_tokenizer(byte_pairs: Any) -> None:
    own = byte_pairs("gpt2", chat=True)
    apart = [i for piece in ("pre", "fix: ") for i in own(piece)["input_ids"]]
    assert own("prefix: ")["input_ids"] != apart  # else the test above shows nothing


LABELS: dict[str, Any] = {"label_tokens": [7, 9], "method": "difference"}
TEMPLATE = "w1 w2 w3 w4 w5 {query} w6 {document} w7 w8 w9 w10 w11"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("limit", [24, 18, 15])
def test_a_cut_pair_scores_as_its_hand_built_ids_and_its_suffix_stays_last(
    limit: int, side: Any, folder: Folder, sentence: Any, words: Any
) -> None:
    path = folder("qwen3", "AutoModelForCausalLM", "chat")
    query, document = "w20 w21 w22 w23", sentence(50, 1)
    room = limit - 12
    texts = {"query": query.split(), "document": document.split()}
    counts = {"query": min(4, room), "document": max(0, room - 4)}
    kept = {k: (v[: counts[k]] if side == "right" else v[len(v) - counts[k] :])
            for k, v in texts.items()}  # fmt: skip
    shown = " ".join(["w1 w2 w3 w4 w5", *kept["query"], "w6", *kept["document"],
                      "w7 w8 w9 w10 w11"])  # fmt: skip
    wanted = words("chat")(shown)["input_ids"]
    assert len(wanted) == limit
    made = {"template": TEMPLATE, "max_length": limit, "truncation": side, **LABELS}
    reranker = Reranker(path, **made)
    (row,) = quiet(reranker.encode, query, document)
    assert (row.ids, row.full, row.truncated) == (wanted, 66, True)
    assert row.ids[-5:] == words("chat")("w7 w8 w9 w10 w11")["input_ids"][1:]
    reference = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    logits = alone(reference, [wanted])[0, -1]
    found = quiet(reranker.score, query, document, activation="identity")
    assert found == pytest.approx([float(logits[9] - logits[7])], abs=1e-5)
    with pytest.raises(headswap.InputError, match="fixed parts around a pair take 12 tokens"):
        Reranker(path, **{**made, "max_length": 10}).score(query, document)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("query", "document"), [(4, 8), (0, 8), (4, 0), (0, 0), (1, 1), (99, 99)])
def test_budgets_within_a_template_are_counted_in_tokens_of_each_text(
    query: int, document: int, side: Any, folder: Folder, sentence: Any, words: Any
) -> None:
    path = folder("qwen3", "AutoModelForCausalLM", "chat")
    texts = [sentence(9, 1).split(), sentence(20, 2).split()]
    kept = [text if not most else text[:most] if side == "right" else text[-most:]
            for text, most in zip(texts, (query, document), strict=True)]  # fmt: skip
    shown = f"w1 w2 w3 w4 w5 {' '.join(kept[0])} w6 {' '.join(kept[1])} w7 w8 w9 w10 w11"
    reranker = Reranker(path, template=TEMPLATE, max_query_tokens=query, truncation=side,
                        max_document_tokens=document, **LABELS)  # fmt: skip
    (row,) = quiet(reranker.encode, *(" ".join(text) for text in texts))
    assert row.ids == words("chat")(shown)["input_ids"]
    assert row.full == 41
    if document:  # and a limit beyond them
        short = Reranker(path, template=TEMPLATE, max_query_tokens=query, max_length=24,
                         max_document_tokens=document, **LABELS)  # fmt: skip
        (row,) = quiet(short.encode, *(" ".join(text) for text in texts))
        assert len(row.ids) <= 24
        assert row.ids[-5:] == words("chat")("w7 w8 w9 w10 w11")["input_ids"][1:]
    for name in ("max_query_tokens", "max_document_tokens"):
        with pytest.raises(headswap.ConversionError, match=f"{name}=-2"):
            Reranker(path, template=TEMPLATE, **{name: -2}, **LABELS)


def test_a_template_of_ones_own_stands_before_a_known_familys(
    byte_pairs: Any, tmp_path: Path
) -> None:
    own = byte_pairs("chat", chat=True)
    own.add_tokens(["no", "yes"])
    tiny("qwen3", vocab_size=400, max_position_embeddings=1024).save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    labels: dict[str, Any] = {"label_tokens": ["no", "yes"], "method": "difference"}
    family = Reranker(tmp_path, **labels)
    assert family.template_source == "Qwen3-Reranker"
    assert "".join(family.template or ()).count("{query}") == 1
    form = "{instruction} q: {query} d: {document}"
    chosen = Reranker(tmp_path, template=form, instruction="be brief", **labels)
    assert (chosen.template, chosen.template_source) == ((form,), "template=")
    (row,) = chosen.encode("fox", "dog", instruction="be long")
    assert own.decode(row.ids[1:]) == "be long q: fox d: dog"
    found = chosen.score("fox", "dog")
    assert found == chosen.score("fox", "dog", instruction="be brief")
    assert abs(found[0] - chosen.score("fox", "dog", instruction="be long")[0]) > 1e-5
    assert abs(found[0] - family.score("fox", "dog")[0]) > 1e-5


# -- segments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 10])
@pytest.mark.parametrize("side", ["left", "right"])
def test_pairs_score_as_the_reference_with_segments_cut_with_the_tokens(
    side: Any, limit: int | None, words: Any, sentence: Any
) -> None:
    model, own = tiny("bert", SEQ, num_labels=3, pad_token_id=0), words("bert")
    pairs = [(sentence(4, n), sentence(3 + 5 * n, 50 + n)) for n in range(5)]
    classifier = Classifier(model, tokenizer=own, max_length=limit, truncation=side)
    found = torch.tensor([answer.logits for answer in quiet(classifier.classify, pairs)])
    own.truncation_side = side
    wanted, plain = [], []
    for pair in pairs:
        row = own(*pair, return_tensors="pt", truncation=limit is not None, max_length=limit)
        assert row["token_type_ids"].sum() > 0
        filled = own(*pair, return_tensors="pt", truncation=limit is not None,
                     max_length=limit or 32, padding="max_length")  # fmt: skip
        with torch.no_grad():
            wanted.append(model(**row).logits)
            plain.append(model(**{**row, "token_type_ids": 0 * row["token_type_ids"]}).logits)
            assert (model(**filled).logits - wanted[-1]).abs().max() < 1e-5
    torch.testing.assert_close(found, torch.cat(wanted), atol=1e-5, rtol=0)
    assert (torch.cat(plain) - found).abs().amax(1).min() > 1e-3  # segments count


def xlnet_tokenizer() -> Any:
    """Marks at the end, a segment of its own for the class mark and one for pads."""
    marks = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>"]
    known = {word: i for i, word in enumerate([*marks, *(f"w{i}" for i in range(60))])}
    inner = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    inner.post_processor = processors.TemplateProcessing(
        single="$A:0 <sep>:0 <cls>:2", pair="$A:0 <sep>:0 $B:1 <sep>:1 <cls>:2",
        special_tokens=[("<sep>", 4), ("<cls>", 3)],
    )  # fmt: skip
    own = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", cls_token="<cls>", sep_token="<sep>",
        pad_token="<pad>", padding_side="left",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip
    own._pad_token_type_id = 3
    return own


def test_a_family_with_its_class_mark_at_the_end_scores_pairs_as_each_alone(
    sentence: Any,
) -> None:
    config = transformers.XLNetConfig(vocab_size=70, d_model=32, n_layer=2, n_head=4, d_inner=64,
                                      num_labels=1, pad_token_id=5)  # fmt: skip
    torch.manual_seed(0)
    model = transformers.XLNetForSequenceClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    own = xlnet_tokenizer()
    documents = [sentence(n, n) for n in (3, 11, 1, 6)]
    with torch.no_grad():
        wanted = [model(**own("w1 w2", each, return_tensors="pt")).logits.item()
                  for each in documents]  # fmt: skip
    reranker = Reranker(model, tokenizer=own, batch_size=4)
    assert reranker.encode("w1 w2", documents)[2].types == [0, 0, 0, 1, 1, 2]
    found = reranker.score("w1 w2", documents, activation="identity")
    assert found == pytest.approx(wanted, abs=1e-5)


# -- lengths --------------------------------------------------------------------------------------


def stores_a_cut_and_pads(own: Any) -> None:
    own.backend_tokenizer.enable_truncation(16)
    own.backend_tokenizer.enable_padding(length=48, pad_id=own.pad_token_id)


Case = tuple[str, Callable[[Any, str], Any], Callable[[Any, str], Any], dict[str, Any]]
CASES: list[Case] = [
    (SEQ, lambda m, t: m.encode([t]), lambda m, t: m.classify(t)[0].logits, {"kind": Classifier}),
    (SEQ, lambda m, t: m.encode("w1", [t]), lambda m, t: m.score("w1", t), {"kind": Reranker}),
    (SEQ, lambda m, t: m.encode("w1", [t]), lambda m, t: m.score("w1", t),
     {"kind": Reranker, "template": "{query} w2 {document} w3"}),
    (SEQ, lambda m, t: m.encode([t]), lambda m, t: m.classify(t)[0].logits,
     {"kind": Classifier, "template": "w2 {text} w3"}),
    (SEQ, lambda m, t: m.encode([chat(t)]), lambda m, t: m.reward(chat(t)), {"kind": RewardModel}),
    ("AutoModel", lambda m, t: m._encode("", [t]), lambda m, t: m.embed(t)[0].tolist(),
     {"kind": Embedder}),
]  # fmt: skip


@pytest.mark.parametrize(("auto", "encode", "answer", "more"), CASES)
def test_no_reader_of_texts_applies_a_cut_or_pads_that_lie_in_the_tokenizers_file(
    auto: str, encode: Any, answer: Any, more: dict[str, Any], folder: Folder, sentence: Any
) -> None:
    del answer
    labels = {"num_labels": 1} if auto == SEQ else {}
    path = folder("bert", auto, "bert", edit=stores_a_cut_and_pads, **labels)
    stored = json.loads((path / "tokenizer.json").read_text("utf-8"))
    assert stored["truncation"]["max_length"] == 16
    made = more["kind"](path, **{k: v for k, v in more.items() if k != "kind"})
    assert made.limit == Limit(64, "config.max_position_embeddings")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for words_ in (3, 40):
            (row,) = encode(made, sentence(words_, 0))
            assert words_ < len(row.ids) <= words_ + 6
            assert not row.truncated
            assert 0 not in row.ids


@pytest.mark.parametrize(("auto", "encode", "answer", "more"), CASES)
def test_a_text_beyond_the_limit_is_refused_before_the_model_runs_and_after_it_all_is_as_before(
    auto: str,
    encode: Any,
    answer: Any,
    more: dict[str, Any],
    folder: Folder,
    sentence: Any,
    spied: Any,
) -> None:
    labels = {"num_labels": 1} if auto == SEQ else {}
    path = folder("bert", auto, "bert", **labels)
    options = {k: v for k, v in more.items() if k != "kind"}
    made = more["kind"](path, truncation=False, **options)
    seen = spied(made.model)
    before = answer(made, sentence(10, 0))
    runs = len(seen)
    fixed = len(encode(made, sentence(10, 0))[0].ids) - 10
    with pytest.raises(headswap.InputError, match="has 65 tokens, and the limit is 64"):
        answer(made, sentence(65 - fixed, 1))
    assert len(seen) == runs
    assert answer(made, sentence(64 - fixed, 1))
    assert answer(made, sentence(10, 0)) == before


@pytest.mark.parametrize("scaling", [
    {"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
])  # fmt: skip
def test_an_embedder_uses_scaled_positions_once_and_to_their_end(
    scaling: dict[str, Any], folder: Folder, sentence: Any
) -> None:
    path = folder("llama", "AutoModel", "chat")
    file = path / "config.json"
    raw = {k: v for k, v in json.loads(file.read_text("utf-8")).items()
           if k not in ("rope_scaling", "rope_parameters")}  # fmt: skip
    raw |= {"rope_theta": 10000.0, "max_position_embeddings": 32, "rope_scaling": scaling}
    file.write_text(json.dumps(raw), "utf-8")
    embedder = Embedder(path)
    assert embedder.limit.value == 64
    (row,) = embedder._encode("", [sentence(50, 0)])
    reference = transformers.AutoModel.from_pretrained(path).eval()
    with torch.no_grad():
        wanted = reference(torch.tensor([row.ids]))[0][0, -1]
    assert len(row.ids) == 51
    np.testing.assert_allclose(embedder.embed(sentence(50, 0))[0], wanted, atol=1e-5, rtol=0)
    with pytest.warns(UserWarning, match="1 of 1 texts were cut to 64 tokens"):
        embedder.embed(sentence(70, 0))


def test_a_tokenizer_without_a_form_for_pairs_is_refused_by_every_route(
    folder: Folder, words: Any
) -> None:
    path = folder("qwen3", SEQ, "chat", num_labels=1)
    for route in (
        lambda: Reranker(path).score("w1", "w2"),
        lambda: Classifier(path).classify([("w1", "w2")]),
        lambda: Encoder(words("chat"), Limit(None, "")).encode([("w1", "w2")]),
    ):
        with pytest.raises(headswap.ConversionError, match=r"no separator .* template"):
            route()
