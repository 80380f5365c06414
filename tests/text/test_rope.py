# SPDX-License-Identifier: Apache-2.0
"""RoPE scaling in every spelling, other sources of a limit, and which of them counts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tiny_models import alone, tiny, tiny_config

import headswap
from headswap.text import Classifier
from headswap.text.lengths import Limit, usable_length
from headswap.text.rope import scaled_length

SEQ = "AutoModelForSequenceClassification"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
V5 = int(transformers.__version__.split(".", maxsplit=1)[0]) >= 5


def config_of(length: int, **fields: Any) -> Any:
    return SimpleNamespace(max_position_embeddings=length, **fields)


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize(("length", "scaling", "usable"), [
    (32, {"kind": "linear", "factor": 2.0}, 64),
    (32, {"kind": "dynamic", "factor": 2.0}, 64),
    (32, {"kind": "yarn", "factor": 2.0}, 64),
    (32, {"kind": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, 64),
    (64, {"kind": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, 64),
    (64, {"kind": "yarn", "factor": None, "original_max_position_embeddings": 32}, 64),
    (40960, {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
    (163840, {"kind": "yarn", "factor": 40, "original_max_position_embeddings": 4096}, 163840),
    (131072, {"kind": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192,
              **LLAMA3}, 131072),
    (131072, {"kind": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192,
              **LLAMA3}, 131072),
    (32, {"kind": "llama3", "factor": 2.0, "original_max_position_embeddings": 32, **LLAMA3}, 64),
    (131072, {"kind": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, 131072),
    (131072, {"kind": "su", "factor": 32.0, "original_max_position_embeddings": 4096}, 131072),
    (32, {"kind": "default", "rope_theta": 10000.0}, 32),
    (32, {"kind": "mrope", "mrope_section": [4], "factor": 2.0}, 32),
    (32, {"kind": "linear", "factor": "two"}, 32),
])  # fmt: skip
def test_a_factor_counts_once_in_every_spelling(
    field: str, key: str, length: int, scaling: dict[str, Any], usable: int
) -> None:
    part = {key: scaling["kind"], **{k: v for k, v in scaling.items() if k != "kind"}}
    found, why = scaled_length(config_of(length, **{field: part}), length)
    assert found == usable
    assert bool(why) == (usable != length)
    assert not why or field in why


def test_an_original_length_beside_the_settings_counts() -> None:
    scaling = {"type": "yarn", "factor": 2.0}
    config = config_of(64, rope_scaling=scaling, original_max_position_embeddings=32)
    assert scaled_length(config, 64)[0] == 64


@pytest.mark.parametrize(("fields", "usable"), [
    ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0},
                          "sliding_attention": {"rope_type": "default"}}}, 32),
    ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0},
                          "sliding_attention": {"rope_type": "linear", "factor": 4.0}}}, 64),
    ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0},
                          "sliding_attention": None}}, 64),
    ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 1e4}, 32),
    ({"rope_parameters": {}, "rope_scaling": {"type": "linear", "factor": 2.0}}, 64),
    ({"rope_parameters": None, "rope_scaling": None}, 32),
])  # fmt: skip
def test_of_several_layer_types_the_smallest_counts(fields: dict[str, Any], usable: int) -> None:
    assert scaled_length(config_of(32, **fields), 32)[0] == usable


SPELLINGS = [
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, **LLAMA3,
                      "original_max_position_embeddings": 32}},
    pytest.param({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
                 marks=pytest.mark.skipif(not V5, reason="a spelling of transformers 5")),
]  # fmt: skip


@pytest.mark.parametrize("fields", SPELLINGS)
def test_a_stored_scaling_is_usable_and_gives_the_references_logits(
    fields: dict[str, Any], words: Any, sentence: Any, tmp_path: Path
) -> None:
    tiny("llama", SEQ, num_labels=3).save_pretrained(tmp_path)
    words("chat").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text("utf-8"))
    raw = {k: v for k, v in raw.items() if k not in ("rope_scaling", "rope_parameters")}
    raw = {**raw, "rope_theta": 10000.0, "max_position_embeddings": 32, **fields}
    file.write_text(json.dumps(raw), "utf-8")
    classifier = Classifier(tmp_path)
    assert classifier.limit.value == 64
    assert "factor 2.0" in classifier.limit.source
    (answer,) = classifier.classify(sentence(50, 0))
    assert (answer.tokens, answer.truncated) == (51, False)
    reference = getattr(transformers, SEQ).from_pretrained(tmp_path).eval()
    (row,) = classifier.encode([sentence(50, 0)])
    wanted = alone(reference, [row.ids])
    torch.testing.assert_close(torch.tensor([answer.logits]), wanted, atol=1e-5, rtol=0)
    with pytest.warns(UserWarning, match="1 of 1 texts were cut to 64 tokens"):
        assert classifier.classify(sentence(70, 0))[0].truncated


def test_a_scaling_inside_a_text_config_is_read(words: Any) -> None:
    text = tiny_config("llama", max_position_embeddings=32,
                       rope_scaling={"rope_type": "linear", "factor": 2.0})  # fmt: skip
    config = SimpleNamespace(max_position_embeddings=8, get_text_config=lambda: text)
    model = SimpleNamespace(config=config, backbone=torch.nn.Module())
    assert usable_length(model, words("chat", model_max_length=16)).value == 64


# -- other sources --------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["mamba", "bloom", "t5", "deberta-v2", "llama", "esm"])
def test_a_tokenizers_limit_counts_where_places_are_looked_up(model_type: str, words: Any) -> None:
    sizes: dict[str, Any] = {"mamba": {"state_size": 4}, "t5": {"d_kv": 8, "d_model": 32},
             "bloom": {"n_layer": 2, "n_head": 4},
             "deberta-v2": {"relative_attention": True, "position_biased_input": False},
             "esm": {"position_embedding_type": "absolute", "mask_token_id": 3}}  # fmt: skip
    config = tiny_config(model_type, **sizes.get(model_type, {}))
    model = transformers.AutoModel.from_config(config)
    found = usable_length(model, words("bert", model_max_length=16))
    assert (found.source == "tokenizer.model_max_length") == (model_type == "esm")


@pytest.mark.parametrize(
    "field",
    [
        "max_seq_len",
        "seq_length",
        "max_target_positions",
        "max_sequence_length",
        "max_seq_length",
        "model_max_length",
    ],
)
def test_the_smallest_of_several_fields_counts(field: str) -> None:  # fmt: skip
    config = config_of(64, **{field: 48})
    config.get_text_config = lambda: config
    model = SimpleNamespace(config=config, backbone=torch.nn.Module())
    assert usable_length(model, SimpleNamespace()) == Limit(48, f"config.{field}")
    setattr(config, field, 96)
    assert usable_length(model, SimpleNamespace()) == Limit(64, "config.max_position_embeddings")


@pytest.mark.parametrize("model_type", ["bert", "llama"])
@pytest.mark.parametrize("place", ["tokenizer", "file"])
def test_a_limit_that_sentence_transformers_saved_counts_for_any_positions(
    place: str, model_type: str, words: Any, sentence: Any, tmp_path: Path
) -> None:
    tiny(model_type, SEQ, num_labels=2, pad_token_id=0).save_pretrained(tmp_path)
    own = words("bert", model_max_length=12 if place == "tokenizer" else 10**30)
    own.save_pretrained(tmp_path)
    if model_type == "llama":
        assert Classifier(tmp_path).limit.value == 64
    modules = [{"idx": 0, "name": "0", "path": "",
                "type": "sentence_transformers.models.Transformer"}]  # fmt: skip
    (tmp_path / "modules.json").write_text(json.dumps(modules), "utf-8")
    length = {"max_seq_length": 12 if place == "file" else None}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(length), "utf-8")
    classifier = Classifier(tmp_path)
    source = {"tokenizer": "tokenizer.model_max_length",
              "file": "sentence-transformers' max_seq_length"}[place]  # fmt: skip
    assert classifier.limit == Limit(12, source)
    with pytest.raises(headswap.InputError, match=r"Text 0 has 42 tokens, and the limit is 12"):
        Classifier(tmp_path, truncation=False).classify(sentence(40, 0))


def test_a_larger_limit_in_a_file_raises_nothing(words: Any, tmp_path: Path) -> None:
    tiny("bert", SEQ, num_labels=2, pad_token_id=0).save_pretrained(tmp_path)
    words("bert").save_pretrained(tmp_path)
    modules = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules), "utf-8")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 4096}', "utf-8")
    assert Classifier(tmp_path).limit == Limit(64, "config.max_position_embeddings")
