# SPDX-License-Identifier: Apache-2.0
"""What a class's own users meet at the edges: outputs under left pads, dtypes, odd inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import alone, padded, rows, tiny
from zoo import CAUSAL, SEQUENCE, batch, zoo_model

import headswap
from headswap.heads import release

SEQ = "AutoModelForSequenceClassification"


@pytest.mark.parametrize("auto", ["AutoModelForCausalLM", SEQ])
@torch.no_grad()
def test_states_and_attentions_come_back_where_the_tokens_stand(auto: str) -> None:
    source = tiny("llama", auto)
    source.set_attn_implementation("eager")
    left, right = padded(rows(), [4, 1, 4, 9], 12), padded(rows(), [0, 0, 0, 0], 12)
    model = headswap.as_seq_cls_model(source, **({} if auto == SEQ else {"num_labels": 2}))
    kept = {"output_hidden_states": True, "output_attentions": True}
    found, wanted = (model(**inputs, **kept) for inputs in (left, right))
    real = left["attention_mask"].bool(), right["attention_mask"].bool()
    for one, other in zip(found.hidden_states, wanted.hidden_states, strict=True):
        torch.testing.assert_close(one[real[0]], other[real[1]], atol=1e-5, rtol=0)
    pairs = [mask.unsqueeze(2) & mask.unsqueeze(1) for mask in real]
    for one, other in zip(found.attentions, wanted.attentions, strict=True):
        one, other = one.transpose(1, 3)[pairs[0].mT], other.transpose(1, 3)[pairs[1].mT]
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    if auto != SEQ:
        embedder = headswap.as_embedding_model(source)
        states = [embedder(**inputs).last_hidden_state for inputs in (left, right)]
        torch.testing.assert_close(states[0][real[0]], states[1][real[1]], atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["bert", "albert", "squeezebert", "distilbert", "roberta"])
@torch.no_grad()
def test_a_head_beside_a_low_precision_backbone(kind: str, dtype: Any, tmp_path: Path) -> None:
    reference = zoo_model(kind, SEQUENCE, num_labels=3)
    reference.save_pretrained(tmp_path)
    model = headswap.load(tmp_path, dtype=dtype)
    _, right = batch()
    found, wanted = model(**right).logits, reference(**right).logits
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() < 0.1 * (1 + wanted.abs().max())
    inside = f"{model.backbone_name}."
    for name in model.head_spec.tensors():
        if not name.startswith(inside):
            assert torch.equal(model.state_dict()[name], reference.state_dict()[name]), name


@torch.no_grad()
def test_a_head_called_like_layers_of_the_backbone(tmp_path: Path) -> None:
    model = headswap.as_seq_cls_model(tiny("bert", "AutoModel"), head="eurobert", num_labels=2)
    model.save_pretrained(tmp_path)
    again = headswap.load(tmp_path, dtype=torch.bfloat16)
    found, wanted = alone(again, rows()), alone(model.eval(), rows())
    assert again.dense.weight.dtype == torch.float32
    assert next(again.backbone.parameters()).dtype == torch.bfloat16
    assert (found - wanted).abs().max() < 0.1 * (1 + wanted.abs().max())


@torch.no_grad()
def test_funnel_s_classifier_does_without_the_decoder_of_its_source(tmp_path: Path) -> None:
    source = zoo_model("funnel", {"funnel": "FunnelForMaskedLM"})
    model = headswap.as_seq_cls_model(source, num_labels=3).eval()
    model.save_pretrained(tmp_path / "made")
    stock = transformers.FunnelForSequenceClassification.from_pretrained(tmp_path / "made").eval()
    _, right = batch()
    torch.testing.assert_close(model(**right).logits, stock(**right).logits, atol=1e-5, rtol=0)
    own = dict(source.funnel.named_parameters())
    for name, tensor in model.backbone.named_parameters():
        assert tensor is own[name], name
    source.save_pretrained(tmp_path / "source")
    headswap.load(tmp_path / "source", num_labels=3, allow_untrained_head=True)


@pytest.mark.parametrize("pooling", ["mean", "last", "late"])
def test_a_pooling_that_shortened_states_do_not_allow_is_refused(
    pooling: Any, tmp_path: Path
) -> None:
    zoo_model("funnel", SEQUENCE, num_labels=3).save_pretrained(tmp_path)
    model = headswap.load(tmp_path, pooling=pooling)
    with pytest.raises(headswap.UnsupportedHeadError, match="a state for every token"):
        model(**batch()[1])


def test_a_decoder_in_memory_without_a_causal_mask_is_honoured_or_refused() -> None:
    source = tiny("llama", is_causal=False, pooling="avg")
    if release() < 5:
        with pytest.raises(headswap.UnsupportedHeadError, match="is_causal=false"):
            headswap.as_seq_cls_model(source, num_labels=2)
        return
    assert headswap.as_seq_cls_model(source, num_labels=2).head_spec.pooling == "mean"
    assert headswap.as_embedding_model(source).head_spec.pooling == "mean"


@torch.no_grad()
def test_longformer_pools_a_token_that_sees_all_for_embeddings_too() -> None:
    reference = zoo_model("longformer", SEQUENCE, num_labels=3)
    model = headswap.as_seq_cls_model(reference.longformer, num_labels=3).eval()
    _, right = batch()
    embeds = model.backbone.embeddings.word_embeddings(right["input_ids"])
    inputs = {"inputs_embeds": embeds, "attention_mask": right["attention_mask"]}
    seen: list[Any] = []
    hook = model.backbone.register_forward_pre_hook(
        lambda _, __, given: seen.append(given["global_attention_mask"]), with_kwargs=True
    )
    model(**inputs)
    hook.remove()
    assert seen[0][:, 0].all()
    assert not seen[0][:, 1:].any()


def test_embeddings_for_a_decoder_that_reads_the_ids_are_refused(tmp_path: Path) -> None:
    zoo_model("t5", SEQUENCE, num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(headswap.HeadswapError, match=r"decoder_input_ids|input_ids"):
        headswap.load(tmp_path)(inputs_embeds=torch.zeros(1, 4, 32))


@pytest.mark.parametrize("kind", ["bart", "mbart", "plbart"])
@torch.no_grad()
def test_a_decoder_of_an_encoder_decoder_is_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    model = headswap.as_seq_cls_model(zoo_model(kind, CAUSAL), num_labels=3).eval()
    model.save_pretrained(tmp_path)
    again = headswap.load(tmp_path)
    _, right = batch()
    torch.testing.assert_close(again(**right).logits, model(**right).logits, atol=1e-5, rtol=0)


def test_a_misshapen_tensor_is_named(tmp_path: Path) -> None:
    tiny("bert", SEQ, num_labels=2).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), "intermediate_size": 48}))
    with pytest.raises(headswap.WeightError, match=r"encoder\.layer\.0\.intermediate.*\[48"):
        headswap.load(tmp_path)
    assert not headswap.plan(tmp_path).ok


@torch.no_grad()
def test_inputs_in_forms_that_people_use() -> None:
    model = headswap.as_seq_cls_model(tiny("llama"), num_labels=2).eval()
    left = padded(rows(), [4, 1, 4, 9], 12)
    wanted = model(**left).logits
    torch.testing.assert_close(model(**left, use_cache=False).logits, wanted)
    positions = torch.arange(12).unsqueeze(0)
    shifted = model(**left, position_ids=positions).logits  # rotary: only distances count
    torch.testing.assert_close(shifted, wanted, atol=1e-5, rtol=0)
    with pytest.raises(headswap.InputError, match=r"position_ids has shape \[3, 4, 12\]"):
        model(**left, position_ids=positions.expand(3, 4, 12))


@pytest.mark.parametrize("ids", [torch.tensor([5, 6]), torch.zeros(0, 4, dtype=torch.long),
                                 torch.zeros(2, 0, dtype=torch.long)], ids=str)  # fmt: skip
def test_ids_of_another_shape_are_refused(ids: torch.Tensor) -> None:
    model = headswap.as_seq_cls_model(tiny("llama"), num_labels=2)
    with pytest.raises(headswap.InputError, match=r"expected .batch, length."):
        model(ids)
    with pytest.raises(headswap.InputError, match="a list"):
        model(torch.tensor([[5, 6]]), attention_mask=[[1, 1]])
