# SPDX-License-Identifier: Apache-2.0
"""Conversions of classes and of models in memory."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import DECODERS, alone, padded, rows, tiny, tiny_config
from transformers import BertForSequenceClassification, LlamaForCausalLM

import headswap

CONVERSIONS = (
    headswap.as_seq_cls_model,
    headswap.as_reward_model,
    headswap.as_token_cls_model,
    headswap.as_embedding_model,
)


def last_states(model: Any, ids: list[list[int]]) -> torch.Tensor:
    """What a causal class feeds its output embedding for the last token of each row."""
    states: list[torch.Tensor] = []
    output = model.get_output_embeddings()
    hook = output.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0][:, -1]))
    with torch.no_grad():
        for row in ids:
            model(input_ids=torch.tensor([row]))
    hook.remove()
    return torch.cat(states)


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_same_arguments_give_the_same_class(convert: Any) -> None:
    first, second = convert(LlamaForCausalLM), convert(LlamaForCausalLM)
    assert first is second
    assert issubclass(first, transformers.PreTrainedModel)


def test_other_arguments_give_another_class() -> None:
    two = headswap.as_seq_cls_model(LlamaForCausalLM, num_labels=2)
    assert two is not headswap.as_seq_cls_model(LlamaForCausalLM, num_labels=3)


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_converting_twice_is_converting_once(convert: Any) -> None:
    once = convert(LlamaForCausalLM)
    assert convert(once) is once


def test_a_native_classifier_comes_back_as_it_is() -> None:
    native = BertForSequenceClassification
    assert headswap.as_seq_cls_model(native) is native
    model = tiny("bert", "AutoModelForSequenceClassification", num_labels=2)
    assert headswap.as_seq_cls_model(model) is model


def test_an_option_that_a_classifier_does_not_fulfil_is_refused() -> None:
    converted = headswap.as_seq_cls_model(LlamaForCausalLM, num_labels=3)
    assert headswap.as_seq_cls_model(converted, num_labels=3) is converted
    with pytest.raises(headswap.ConversionError, match="3 labels, not 5"):
        headswap.as_seq_cls_model(converted, num_labels=5)


def test_an_embedder_becomes_a_classifier_of_the_class_behind_it() -> None:
    embedder = headswap.as_embedding_model(LlamaForCausalLM)
    classifier = headswap.as_seq_cls_model(embedder)
    assert issubclass(classifier, headswap.SequenceClassificationModel)


@pytest.mark.parametrize("source", [3, torch.nn.Linear, torch.nn.Linear(2, 2), "llama"])
def test_sources_that_are_no_models_are_refused(source: Any) -> None:
    with pytest.raises(headswap.ConversionError, match=r"headswap\.load"):
        headswap.as_seq_cls_model(source)


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_classes_pickle(convert: Any) -> None:
    cls = convert(LlamaForCausalLM)
    assert pickle.loads(pickle.dumps(cls)) is cls
    assert copy.deepcopy(cls) is cls


def test_classes_have_a_real_path() -> None:
    import headswap.convert.classes as classes

    cls = headswap.as_seq_cls_model(transformers.GraniteForCausalLM)
    assert cls.__qualname__ == "GraniteForSequenceClassification"
    assert classes.GraniteForSequenceClassification is not None
    with pytest.raises(AttributeError, match="NoSuchForSequenceClassification"):
        _ = classes.NoSuchForSequenceClassification


def in_child(payload: bytes, queue: Any) -> None:
    cls, model = pickle.loads(payload)
    again = headswap.as_seq_cls_model(LlamaForCausalLM, num_labels=3)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[5, 6, 7]])).logits
    queue.put((cls is again, type(model) is cls, logits.tolist()))


def test_classes_and_models_reach_a_spawned_process(tmp_path: Path) -> None:
    model = headswap.as_seq_cls_model(tiny("llama"), num_labels=3)
    cls = headswap.as_seq_cls_model(LlamaForCausalLM, num_labels=3)
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([[5, 6, 7]])).logits
    file = tmp_path / "child.py"
    file.write_text(
        "import pickle, sys, torch, headswap\n"
        "from transformers import LlamaForCausalLM\n"
        "cls, model = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert cls is headswap.as_seq_cls_model(LlamaForCausalLM, num_labels=3)\n"
        "assert type(model) is cls\n"
        "torch.save(model(input_ids=torch.tensor([[5, 6, 7]])).logits.detach(), sys.argv[2])\n"
    )
    (tmp_path / "in.pkl").write_bytes(pickle.dumps((cls, model)))
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_file, args=(str(file), str(tmp_path)))
    process.start()
    process.join()
    assert process.exitcode == 0
    torch.testing.assert_close(torch.load(tmp_path / "out.pt"), wanted)


def run_file(file: str, folder: str) -> None:
    import runpy
    import sys

    sys.argv = [file, f"{folder}/in.pkl", f"{folder}/out.pt"]
    runpy.run_path(file)


@pytest.mark.parametrize("model_type", [*DECODERS, "granite", "cohere"])
def test_a_model_is_scored_on_what_it_feeds_its_output_embedding(model_type: str) -> None:
    source = tiny(model_type)
    model = headswap.as_seq_cls_model(source, num_labels=3)
    ids = rows()
    weight = model.get_submodule(model.head_spec.output.path).weight
    wanted = last_states(source, ids) @ weight.T
    torch.testing.assert_close(alone(model, ids), wanted.detach(), atol=1e-5, rtol=0)
    with torch.no_grad():
        batch = model(**padded(ids, [9, 3, 6, 11], width=20)).logits
    torch.testing.assert_close(batch, wanted.detach(), atol=1e-5, rtol=0)


def test_a_converted_model_shares_the_weights_and_leaves_the_source_alone() -> None:
    source = tiny("llama")
    config, ids = copy.deepcopy(source.config.to_dict()), torch.tensor([[5, 6, 7]])
    before = source(input_ids=ids).logits
    model = headswap.as_seq_cls_model(source, id2label={0: "no", 1: "yes", 2: "maybe"})
    shared = {p.data_ptr() for p in source.model.parameters()}
    assert {p.data_ptr() for p in model.model.parameters()} == shared
    assert source.config.to_dict() == config
    assert model.config.id2label == {0: "no", 1: "yes", 2: "maybe"}
    model.train()
    assert not source.training
    assert not any(module.training for module in source.modules())
    torch.testing.assert_close(source(input_ids=ids).logits, before)
    assert source.generate(ids, max_new_tokens=3, do_sample=False).shape[1] <= 6


def test_a_fresh_head_says_so_until_it_is_trained() -> None:
    model = headswap.as_seq_cls_model(tiny("llama"), num_labels=2)
    assert model.untrained_head
    model.train()
    batch = padded(rows(), [0] * 4, width=12)
    model(**batch, labels=torch.tensor([0, 1, 0, 1])).loss.backward()
    assert not model.untrained_head


def test_a_reward_model_gives_one_raw_value() -> None:
    model = headswap.as_reward_model(tiny("qwen3"))
    assert model(input_ids=torch.tensor([[5, 6, 7]])).logits.shape == (1, 1)
    assert model.config.problem_type == "regression"


def test_a_token_classifier_has_a_row_for_each_token() -> None:
    model = headswap.as_token_cls_model(tiny("mistral"), num_labels=5)
    assert model(input_ids=torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, 5)


@pytest.mark.parametrize(("model_type", "auto", "pooling"), [
    ("llama", "AutoModelForCausalLM", "last"),
    ("bert", "AutoModel", "mean"),
    ("bert", "AutoModelForMaskedLM", "mean"),
])  # fmt: skip
def test_an_embedder_pools_hidden_states(model_type: str, auto: str, pooling: str) -> None:
    source = tiny(model_type, auto)
    model = headswap.as_embedding_model(source)
    ids = rows()
    with torch.no_grad():
        base = getattr(source, source.base_model_prefix, source)
        states = [base(input_ids=torch.tensor([row])).last_hidden_state[0] for row in ids]
        wanted = torch.stack([s[-1] if pooling == "last" else s.mean(0) for s in states])
        found = model(**padded(ids, [9, 3, 6, 11], width=20)).pooler_output
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("head", ["bert", "roberta"])
def test_a_bert_style_head_on_a_decoder(tmp_path: Path, head: str) -> None:
    model = headswap.as_seq_cls_model(tiny("llama"), num_labels=3, head=head, pooling="last")
    ids = rows()
    state = last_states(tiny("llama"), ids)
    dense, output = (model.get_submodule(layer.path) for layer in model.head_spec.dense)
    wanted = output(torch.tanh(dense(state))).detach()
    torch.testing.assert_close(alone(model, ids), wanted, atol=1e-5, rtol=0)
    model.save_pretrained(tmp_path)
    again = headswap.load(tmp_path)
    assert again.head_spec == model.head_spec
    torch.testing.assert_close(alone(again, ids), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
def test_a_score_head_on_an_encoder(tmp_path: Path, model_type: str) -> None:
    source = tiny(model_type, "AutoModelForMaskedLM")
    model = headswap.as_seq_cls_model(source, num_labels=3, head="score", pooling="first")
    ids = rows()
    base = getattr(source, source.base_model_prefix)
    with torch.no_grad():
        states = torch.cat([base(torch.tensor([row]))[0][:, 0] for row in ids])
    wanted = (states @ model.score.weight.T).detach()
    torch.testing.assert_close(alone(model, ids), wanted, atol=1e-5, rtol=0)
    model.save_pretrained(tmp_path)
    again = headswap.load(tmp_path)
    torch.testing.assert_close(alone(again, ids), wanted, atol=1e-5, rtol=0)


def test_a_checkpoint_with_another_head_has_a_name_that_others_refuse(tmp_path: Path) -> None:
    headswap.as_seq_cls_model(tiny("llama"), head="bert").save_pretrained(tmp_path)
    named = transformers.AutoConfig.from_pretrained(tmp_path).architectures
    assert named == ["LlamaHeadswapForSequenceClassification"]
    assert not hasattr(transformers, named[0])


@pytest.mark.parametrize("model_type", ["llama", "bert", "granite"])
def test_save_and_load_round_trip(tmp_path: Path, model_type: str) -> None:
    auto = "AutoModelForMaskedLM" if model_type == "bert" else "AutoModelForCausalLM"
    names = {0: "zero", 1: "one", 2: "two"}
    model = headswap.as_seq_cls_model(tiny(model_type, auto), id2label=names)
    ids = rows()
    model.save_pretrained(tmp_path)
    for again in (headswap.load(tmp_path), type(model).from_pretrained(tmp_path)):
        assert again.config.id2label == names
        assert again.untrained_head
        torch.testing.assert_close(alone(again, ids), alone(model, ids), atol=1e-6, rtol=0)


def test_a_class_is_built_from_a_config() -> None:
    cls = headswap.as_seq_cls_model(LlamaForCausalLM, num_labels=4)
    config = tiny_config("llama")
    model = cls(config)
    assert model.score.weight.shape == (4, 32)
    assert config.num_labels == 2


def test_a_trainer_step_lowers_the_loss(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = headswap.as_seq_cls_model(tiny("llama"), num_labels=2)
    data = [
        {"input_ids": row, "attention_mask": [1] * len(row), "labels": i % 2}
        for i, row in enumerate(rows((6,) * 8))
    ]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=8, learning_rate=1e-2, report_to=[], use_cpu=True,
        per_device_train_batch_size=8, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    batch = {key: torch.tensor([row[key] for row in data]) for key in data[0]}
    before = float(model.eval()(**batch).loss)
    transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
    assert float(model.eval()(**batch).loss) < before
    assert not model.untrained_head


def test_return_dict_false_gives_a_tuple() -> None:
    model = headswap.as_seq_cls_model(tiny("llama"), num_labels=2)
    found = model(input_ids=torch.tensor([[5, 6, 7]]), return_dict=False)
    assert isinstance(found, tuple)
    assert found[0].shape == (1, 2)
