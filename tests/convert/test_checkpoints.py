# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint on disk may look like: heads, labels and tensors that agree, or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import alone, rows, tiny, word_tokenizer

import headswap
from headswap.convert.verify import verify

SEQ = "AutoModelForSequenceClassification"


def edit_config(folder: Path, **values: Any) -> None:
    """Set fields of config.json; None removes one."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_state(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


# -- heads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model_type", "auto", "tensor"), [
    ("llama", "AutoModelForCausalLM", "score.weight"),
    ("gpt2", "AutoModelForCausalLM", "score.weight"),
    ("bert", "AutoModelForMaskedLM", "classifier.weight"),
    ("roberta", "AutoModelForMaskedLM", r"classifier.out_proj.weight"),
])  # fmt: skip
def test_a_missing_head_names_the_tensor_and_both_ways_out(
    saved: Any, model_type: str, auto: str, tensor: str
) -> None:
    folder = saved(model_type, auto)
    with pytest.raises(headswap.MissingHeadError) as caught:
        headswap.load(folder, num_labels=2)
    assert tensor in caught.value.tensors
    for way in (tensor, "label_tokens", "allow_untrained_head=True"):
        assert way in str(caught.value)
    with pytest.raises(headswap.MissingHeadError, match=tensor):
        verify(folder, num_labels=2)
    model = headswap.load(folder, num_labels=2, allow_untrained_head=True)
    assert model.untrained_head
    assert model.get_submodule(model.head_spec.output.path).weight.abs().max() > 0


def test_a_class_refuses_a_missing_head_too(saved: Any) -> None:
    import transformers

    cls = headswap.as_seq_cls_model(transformers.LlamaForCausalLM, num_labels=2)
    with pytest.raises(headswap.MissingHeadError):
        cls.from_pretrained(saved("llama"))
    assert cls.from_pretrained(saved("llama"), allow_untrained_head=True).untrained_head


def test_a_bert_head_without_its_pooler_is_refused(saved: Any) -> None:
    folder = saved("bert", SEQ, num_labels=2)
    edit_state(folder, lambda s: [s.pop(f"bert.pooler.dense.{x}") for x in ("weight", "bias")])
    with pytest.raises(headswap.MissingHeadError, match=r"bert\.pooler\.dense\.weight"):
        headswap.load(folder)


def test_a_stray_pooler_of_a_family_without_one_is_dropped(saved: Any) -> None:
    folder = saved("roberta", SEQ, num_labels=2)
    before = alone(headswap.load(folder), rows())
    edit_state(folder, lambda s: s.update({"roberta.pooler.dense.weight": torch.zeros(32, 32)}))
    torch.testing.assert_close(alone(headswap.load(folder), rows()), before)
    plan = headswap.plan(folder)
    dropped = {t.name: t.reason for t in plan.tensors if t.action == "dropped"}
    assert "roberta.pooler.dense.weight" in dropped
    assert "pooler" in dropped["roberta.pooler.dense.weight"]


def test_a_stored_bias_of_a_score_head_is_used(saved: Any, tmp_path: Path) -> None:
    folder = saved("gpt_neox", SEQ, num_labels=3)
    bias = torch.tensor([1.0, -2.0, 0.5])
    wanted = alone(tiny("gpt_neox", SEQ, num_labels=3), rows()) + bias
    edit_state(folder, lambda s: s.update({"score.bias": bias}))
    model = headswap.load(folder)
    torch.testing.assert_close(alone(model, rows()), wanted, atol=1e-5, rtol=0)
    model.save_pretrained(tmp_path / "out")
    again = headswap.load(tmp_path / "out")
    torch.testing.assert_close(alone(again, rows()), wanted, atol=1e-5, rtol=0)


def test_label_tokens_on_a_checkpoint_with_a_head_are_refused(saved: Any) -> None:
    with pytest.raises(headswap.ConversionError, match=r"already has a head|Label tokens need"):
        headswap.load(saved("qwen3", SEQ, num_labels=2), label_tokens=[7, 41])


# -- tensors --------------------------------------------------------------------------------------


def test_a_tensor_without_a_place_is_an_error(saved: Any) -> None:
    folder = saved("llama", SEQ, num_labels=2)
    edit_state(folder, lambda s: s.update({"model.layers.0.extra.weight": torch.zeros(2)}))
    with pytest.raises(headswap.WeightError, match=r"model\.layers\.0\.extra\.weight"):
        headswap.load(folder)


def test_a_missing_backbone_tensor_is_an_error_even_with_an_untrained_head(saved: Any) -> None:
    folder = saved("llama")
    edit_state(folder, lambda s: s.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(headswap.WeightError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        headswap.load(folder, allow_untrained_head=True)


def test_a_head_under_another_name_is_not_taken_for_a_missing_one(saved: Any) -> None:
    folder = saved("llama", SEQ, num_labels=2)
    edit_state(folder, lambda s: s.update({"v_head.weight": s.pop("score.weight")}))
    with pytest.raises(headswap.WeightError, match=r"v_head\.weight"):
        headswap.load(folder, allow_untrained_head=True)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_names_with_and_without_the_prefix_load_alike(saved: Any, prefix: str) -> None:
    folder = saved("llama", SEQ, num_labels=2)
    wanted = alone(tiny("llama", SEQ, num_labels=2), rows())

    def rename(state: dict[str, torch.Tensor]) -> None:
        for name in [n for n in state if n.startswith("model.")]:
            state[prefix + name.removeprefix("model.")] = state.pop(name)

    edit_state(folder, rename)
    torch.testing.assert_close(alone(headswap.load(folder), rows()), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["one file", "sharded", "pickled"])
def test_sharded_and_pickled_weights_load_alike(tmp_path: Path, kind: str) -> None:
    source = tiny("bert", SEQ, num_labels=2)
    source.save_pretrained(tmp_path, max_shard_size="20KB" if kind == "sharded" else "1GB")
    if kind == "sharded":
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
    if kind == "pickled":
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    model = headswap.load(tmp_path)
    torch.testing.assert_close(alone(model, rows()), alone(source, rows()), atol=1e-5, rtol=0)


# -- labels ---------------------------------------------------------------------------------------


def test_rows_of_the_stored_head_decide_where_the_config_is_silent(saved: Any) -> None:
    for labels in (1, 3):
        folder = saved("bert", SEQ, num_labels=labels)
        edit_config(folder, id2label=None, label2id=None, num_labels=None)
        plan = headswap.plan(folder)
        assert plan.labels_generated
        assert len(plan.labels) == labels
        wanted = alone(tiny("bert", SEQ, num_labels=labels), rows())
        torch.testing.assert_close(alone(headswap.load(folder), rows()), wanted, atol=1e-5, rtol=0)


def test_a_declared_count_that_differs_from_the_rows_is_an_error(saved: Any) -> None:
    folder = saved("bert", SEQ, num_labels=3)
    edit_config(folder, id2label={"0": "a", "1": "b"}, label2id={"a": 0, "b": 1})
    with pytest.raises(headswap.LabelError, match=r"classifier\.weight has 3 rows.*2 labels"):
        headswap.load(folder)


def test_a_requested_count_that_differs_from_the_rows_is_an_error(saved: Any) -> None:
    with pytest.raises(headswap.LabelError, match=r"score\.weight has 3 rows.*5 labels"):
        headswap.load(saved("llama", SEQ, num_labels=3), num_labels=5)


def test_columns_follow_the_number_of_a_label_and_not_the_order_in_the_file(saved: Any) -> None:
    folder = saved("llama", SEQ, num_labels=11)
    names = {str(i): f"name {i}" for i in (10, 2, 0, 9, 1, 3, 8, 4, 7, 5, 6)}
    edit_config(folder, id2label=names, label2id={v: int(k) for k, v in names.items()})
    assert headswap.plan(folder).labels == tuple(f"name {i}" for i in range(11))
    assert not headswap.plan(folder).labels_generated


def test_contradictory_label_maps_name_the_label(saved: Any) -> None:
    folder = saved("llama", SEQ, num_labels=2)
    edit_config(folder, id2label={"0": "a", "1": "b"}, label2id={"a": 1, "b": 0})
    with pytest.raises(headswap.LabelError, match="'a'"):
        headswap.load(folder)


def test_label_names_of_a_causal_config_are_not_taken_for_labels(saved: Any) -> None:
    """transformers writes two made-up labels into causal configs."""
    folder = saved("llama")
    edit_config(folder, id2label={"0": "LABEL_0", "1": "LABEL_1"})
    model = headswap.load(folder, num_labels=3, allow_untrained_head=True)
    assert model.config.num_labels == 3


# -- files ----------------------------------------------------------------------------------------


def test_the_tokenizers_pad_id_is_taken_where_the_config_has_none(saved: Any) -> None:
    folder = saved("llama", SEQ, num_labels=2, pad_token_id=None)
    word_tokenizer().save_pretrained(folder)
    assert headswap.load(folder).config.pad_token_id == 1
    assert any("pad_token_id 1" in note for note in headswap.plan(folder).notes)


@pytest.mark.parametrize(("break_it", "message"), [
    (lambda f: (f / "config.json").unlink(), "no config.json"),
    (lambda f: (f / "config.json").write_text("{"), "can't be read as JSON"),
    (lambda f: (f / "config.json").write_text("[]"), "no JSON object"),
    (lambda f: edit_config(f, model_type="nonsense"), "config can't be read"),
    (lambda f: (f / "model.safetensors").unlink(), "no model"),
    (lambda f: (f / "model.safetensors").write_bytes(b"\0" * 40), "can't be read"),
    (lambda f: (f / "model.safetensors").write_bytes(b""), "can't be read"),
    (lambda f: (f / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../model.safetensors"}})), "not a file in that folder"),
])  # fmt: skip
def test_damaged_checkpoints_are_named(saved: Any, break_it: Any, message: str) -> None:
    folder = saved("llama", SEQ, num_labels=2)
    break_it(folder)
    with pytest.raises(headswap.CheckpointError, match=message):
        headswap.load(folder)


def test_a_path_that_is_not_there_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(headswap.CheckpointError, match="nowhere"):
        headswap.load(tmp_path / "nowhere")


def test_a_truncated_file_is_named(saved: Any) -> None:
    folder = saved("llama", SEQ, num_labels=2)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(headswap.CheckpointError, match=r"model\.safetensors"):
        headswap.load(folder)


def test_a_pickle_with_code_is_refused_and_not_run(saved: Any, tmp_path: Path) -> None:
    import pickle

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "pwned",))

    folder = saved("llama", SEQ, num_labels=2)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Evil()}))
    with pytest.raises(headswap.CheckpointError):
        headswap.load(folder)
    assert not (tmp_path / "pwned").exists()
