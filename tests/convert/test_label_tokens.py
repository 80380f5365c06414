# SPDX-License-Identifier: Apache-2.0
"""Heads made from a language model's own output rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import DECODERS, alone, padded, rows, tiny, word_tokenizer
from transformers import LlamaForCausalLM

import headswap

FAMILIES = (*DECODERS, "granite", "cohere")


def token_logits(model: Any, ids: list[list[int]], tokens: list[int]) -> torch.Tensor:
    """The causal model's own logits of `tokens` after each row."""
    with torch.no_grad():
        found = [model(input_ids=torch.tensor([row])).logits[:, -1, tokens] for row in ids]
    return torch.cat(found)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_rows_give_the_models_own_token_logits(saved: Any, model_type: str, tied: bool) -> None:
    more = {"tie_word_embeddings": tied}
    source = tiny(model_type, **more)
    ids, tokens = rows(), [7, 41, 8]
    wanted = token_logits(source, ids, tokens)
    for model in (
        headswap.as_seq_cls_model(source, label_tokens=tokens),
        headswap.load(saved(model_type, **more), label_tokens=tokens),
    ):
        assert not model.untrained_head
        torch.testing.assert_close(alone(model, ids), wanted, atol=1e-5, rtol=0)
        with torch.no_grad():
            batch = model(**padded(ids, [9, 3, 6, 11], width=20)).logits
        torch.testing.assert_close(batch, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_difference_is_the_second_minus_the_first(saved: Any, model_type: str) -> None:
    logits = token_logits(tiny(model_type), rows(), [7, 41])
    model = headswap.load(saved(model_type), label_tokens=[7, 41], method="difference")
    assert model.config.num_labels == 1
    wanted = logits[:, 1:] - logits[:, :1]
    torch.testing.assert_close(alone(model, rows()), wanted, atol=1e-5, rtol=0)


def test_softmax_over_two_rows_is_the_sigmoid_of_their_difference() -> None:
    source = tiny("qwen3")
    two = alone(headswap.as_seq_cls_model(source, label_tokens=[7, 41]), rows())
    one = headswap.as_seq_cls_model(source, label_tokens=[7, 41], method="difference")
    found = torch.sigmoid(alone(one, rows()))[:, 0]
    torch.testing.assert_close(found, two.softmax(-1)[:, 1], atol=1e-6, rtol=0)


def test_a_soft_cap_is_applied_to_each_token_before_subtracting(saved: Any) -> None:
    more = {"final_logit_softcapping": 0.5}
    logits = token_logits(tiny("gemma2", **more), rows(), [7, 41])
    options: dict[str, Any] = {"label_tokens": [7, 41], "method": "difference"}
    found = alone(headswap.load(saved("gemma2", **more), **options), rows())
    torch.testing.assert_close(found, logits[:, 1:] - logits[:, :1], atol=1e-5, rtol=0)
    uncapped = headswap.load(saved("gemma2", final_logit_softcapping=None), **options)
    assert (alone(uncapped, rows()) - found).abs().max() > 1e-2


@pytest.mark.parametrize("model_type", ["gemma2", "phi"])
def test_heads_that_a_stock_config_cannot_express_survive_saving(
    saved: Any, tmp_path: Any, model_type: str
) -> None:
    """Gemma 2 caps its logits, Phi has a bias on them."""
    model = headswap.load(saved(model_type), label_tokens=[7, 41], method="difference")
    model.save_pretrained(tmp_path / "out")
    again = headswap.load(tmp_path / "out")
    assert "Headswap" in type(again).__name__
    torch.testing.assert_close(alone(again, rows()), alone(model, rows()), atol=1e-6, rtol=0)


def test_words_become_labels() -> None:
    tokenizer = word_tokenizer()
    model = headswap.as_seq_cls_model(
        tiny("llama"), label_tokens=["no", "yes"], tokenizer=tokenizer
    )
    known = tokenizer.get_vocab()
    assert model.config.id2label == {0: "no", 1: "yes"}
    wanted = token_logits(tiny("llama"), rows(), [known["no"], known["yes"]])
    torch.testing.assert_close(alone(model, rows()), wanted, atol=1e-5, rtol=0)


def test_the_checkpoints_own_tokenizer_is_used(saved: Any) -> None:
    folder = saved("llama")
    word_tokenizer().save_pretrained(folder)
    model = headswap.load(folder, label_tokens=["no", "yes"], method="difference")
    assert model.config.id2label == {0: "yes"}


@pytest.mark.parametrize(("tokens", "message"), [
    (["yes", "two words"], "not one token"),
    (["yes", "Yess"], "not one token"),
    ([3, 99], "outside the vocabulary"),
    ([3, -1], "outside the vocabulary"),
    ([3, 3], "twice"),
    ([3, 2.5], "neither a string nor a token id"),
    ([], "must be a list"),
    ("yes", "must be a list"),
])  # fmt: skip
def test_bad_label_tokens_are_refused(tokens: Any, message: str) -> None:
    with pytest.raises(headswap.LabelError, match=message):
        headswap.as_seq_cls_model(tiny("llama"), label_tokens=tokens, tokenizer=word_tokenizer())


def test_a_word_of_several_tokens_is_shown_with_its_pieces_and_alternatives() -> None:
    with pytest.raises(headswap.LabelError) as caught:
        headswap.as_seq_cls_model(
            tiny("llama"), label_tokens=["yes", "noo"], tokenizer=word_tokenizer()
        )
    assert "no" in caught.value.alternatives
    assert caught.value.pieces == ("<unk>",)


def test_words_need_a_tokenizer() -> None:
    with pytest.raises(headswap.LabelError, match="tokenizer="):
        headswap.as_seq_cls_model(tiny("llama"), label_tokens=["no", "yes"])


@pytest.mark.parametrize(("options", "message"), [
    ({"method": "difference"}, "needs label_tokens"),
    ({"label_tokens": [3, 4], "method": "foo"}, "Unknown method 'foo'"),
    ({"label_tokens": [3, 4, 5], "method": "difference"}, "needs two label tokens"),
    ({"label_tokens": [3, 4], "num_labels": 3}, "contradictory"),
    ({"num_labels": 0}, "from 1 up"),
    ({"id2label": {0: "a", 2: "b"}}, "expected 0 to n-1"),
    ({"id2label": ["a", "a"]}, "one name to two labels"),
    ({"problem_type": "foo"}, "Unknown problem_type 'foo'"),
    ({"head": "foo"}, "Unknown head family 'foo'"),
    ({"pooling": "foo"}, "Unknown pooling 'foo'"),
])  # fmt: skip
def test_contradictory_options_are_refused_by_name(options: Any, message: str) -> None:
    with pytest.raises(headswap.ConversionError, match=message):
        headswap.as_seq_cls_model(tiny("llama"), **options)


def test_a_class_with_label_tokens_derives_its_head_on_loading(saved: Any) -> None:
    cls = headswap.as_seq_cls_model(LlamaForCausalLM, label_tokens=[7, 41])
    model = cls.from_pretrained(saved("llama"))
    wanted = token_logits(tiny("llama"), rows(), [7, 41])
    torch.testing.assert_close(alone(model, rows()), wanted, atol=1e-5, rtol=0)


def test_a_class_that_changes_its_logits_unknown_to_us_is_refused() -> None:
    class Loud(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 3
            return output

    source = Loud(tiny("llama").config).eval()
    with pytest.raises(headswap.UnsupportedHeadError, match="own token logits differ"):
        headswap.as_seq_cls_model(source, label_tokens=[7, 41])


def test_rows_that_are_all_zero_are_refused() -> None:
    source = tiny("llama", tie_word_embeddings=False)
    source.lm_head.weight.data.zero_()
    with pytest.raises(headswap.UnsupportedHeadError, match="all zero"):
        headswap.as_seq_cls_model(source, label_tokens=[7, 41])


def test_an_encoder_has_no_output_rows_to_take(saved: Any) -> None:
    with pytest.raises(headswap.ConversionError, match="Label tokens need"):
        headswap.load(saved("bert", "AutoModel"), label_tokens=[7, 41])


def test_an_untied_checkpoint_without_its_output_matrix_is_refused(saved: Any) -> None:
    folder = saved("llama", tie_word_embeddings=False)
    drop(folder, "lm_head.weight")
    with pytest.raises(headswap.WeightError, match=r"lm_head\.weight"):
        headswap.load(folder, label_tokens=[7, 41])


def drop(folder: Any, name: str) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    del state[name]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def test_near_tokens_are_judged_by_the_size_of_their_own_logits(saved: Any, tmp_path: Any) -> None:
    """A small difference of two large logits has the rounding of these."""
    from headswap.convert.verify import verify

    model = tiny("llama", tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[7] *= 5000.0
        model.lm_head.weight[41] = model.lm_head.weight[7] + 1e-3
    model.save_pretrained(tmp_path / "near")
    word_tokenizer().save_pretrained(tmp_path / "near")
    options: dict[str, Any] = {"label_tokens": [7, 41], "method": "difference"}
    found = verify(tmp_path / "near", **options)
    assert found.ok
    assert found.scale > 100
    assert max(case.difference or 0.0 for case in found.cases) > 1e-5
    headswap.convert_checkpoint(tmp_path / "near", tmp_path / "out", **options)
