# SPDX-License-Identifier: Apache-2.0
"""PEFT adapters: their head, their labels and what they change, compared with PEFT's own models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import alone, padded, rows, tiny

import headswap
from headswap.convert import verify

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

BASES = {"llama": "AutoModelForCausalLM", "bert": "AutoModelForSequenceClassification",
         "roberta": "AutoModelForMaskedLM"}  # fmt: skip
CLASSES = {"SEQ_CLS": "AutoModelForSequenceClassification", "CAUSAL_LM": "AutoModelForCausalLM",
           "TOKEN_CLS": "AutoModelForTokenClassification", None: "AutoModel"}  # fmt: skip
TARGETS = ["q_proj", "query"]
LABELS = ["red", "green", "blue", "white", "black"]


def trained(model: Any, seed: int = 1) -> Any:
    """`model` with every trainable parameter changed, in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


class Trained:
    """An adapter trained on a tiny base: both folders, and the stock class under PEFT."""

    def __init__(self, folder: Path, model_type: str, task: str | None = "SEQ_CLS", *,
                 labels: int = 5, base: dict[str, Any] | None = None, seed: int = 1,
                 **lora: Any) -> None:  # fmt: skip
        self.base, self.folder = folder / f"{model_type}-base", folder / f"adapter-{seed}"
        if not self.base.exists():
            # A classifier's base has the labels that its own head was trained for.
            tiny(model_type, BASES[model_type], **(base or {})).save_pretrained(self.base)
        sizes = {"num_labels": labels} if task and task.endswith("_CLS") else {}
        stock = getattr(transformers, CLASSES[task])
        self.stock = stock.from_pretrained(self.base, ignore_mismatched_sizes=True, **sizes)
        if not lora.get("target_modules"):
            lora["target_modules"] = TARGETS
        config = peft.LoraConfig(task_type=task, **lora)
        self.model = trained(peft.get_peft_model(self.stock, config), seed)
        self.model.save_pretrained(self.folder)

    def edit(self, change: Any) -> None:
        """Save the adapter's tensors again, after `change` worked on them."""
        file = self.folder / "adapter_model.safetensors"
        state = load_file(file)
        change(state)
        save_file(state, file)

    def edit_json(self, name: str = "adapter_config.json", **values: Any) -> None:
        file = self.folder / name
        old = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**old, **values}))


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


# -- a trained head ---------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "bert", "roberta"])
def test_an_adapter_with_a_head_gives_peft_s_logits(tmp_path: Path, model_type: str) -> None:
    made = Trained(tmp_path, model_type, labels=5)
    wanted = alone(made.model, rows())
    for model in (headswap.load(made.base, adapter=made.folder, num_labels=5),
                  headswap.load(made.folder, num_labels=5)):  # fmt: skip
        close(alone(model, rows()), wanted)
        batch = padded(rows(), [3, 0, 1, 9], 12)
        with torch.no_grad():
            close(model(**batch).logits, wanted)
        assert not model.untrained_head
        assert all(parameter.requires_grad for parameter in model.parameters())
    assert headswap.plan(made.folder, num_labels=5).ok


def test_a_token_classifier_s_adapter_says_its_task(tmp_path: Path) -> None:
    made = Trained(tmp_path, "roberta", "TOKEN_CLS")
    model = headswap.load(made.folder)
    assert model.conversion.task == "token-classify"
    ids = torch.tensor([rows()[0]])
    with torch.no_grad():
        close(model(input_ids=ids).logits, made.model(input_ids=ids).logits)


@pytest.mark.parametrize("spelling", [
    "score.weight",
    "score.modules_to_save.weight",
    "score.modules_to_save.default.weight",
    "model.score.weight",
])  # fmt: skip
def test_a_head_is_found_in_every_spelling(tmp_path: Path, spelling: str) -> None:
    made = Trained(tmp_path, "llama")

    def respell(state: dict[str, torch.Tensor]) -> None:
        head = state.pop("base_model.model.score.weight")
        state[f"base_model.model.{spelling}"] = head
        # The base's copy, which PEFT keeps beside the trained one.
        state["base_model.model.score.original_module.weight"] = torch.zeros_like(head)

    made.edit(respell)
    close(alone(headswap.load(made.folder), rows()), alone(made.model, rows()))
    dropped = [t.name for t in headswap.plan(made.folder).tensors if t.action == "dropped"]
    assert "base_model.model.score.original_module.weight" in dropped


@pytest.mark.parametrize("spelling", ["modules_to_save.dense", "modules_to_save.default.dense"])
def test_a_head_of_several_layers_is_found_inside_its_wrapper(
    tmp_path: Path, spelling: str
) -> None:
    made = Trained(tmp_path, "roberta")

    def respell(state: dict[str, torch.Tensor]) -> None:
        for kind in ("weight", "bias"):
            head = state.pop(f"base_model.model.classifier.dense.{kind}")
            state[f"base_model.model.classifier.{spelling}.{kind}"] = head

    made.edit(respell)
    close(alone(headswap.load(made.folder), rows()), alone(made.model, rows()))


def test_a_whole_state_dict_with_the_adapter_s_name_in_it_is_read(tmp_path: Path) -> None:
    made = Trained(tmp_path, "llama")

    def respell(state: dict[str, torch.Tensor]) -> None:
        for name in list(state):
            head = "base_model.model.score.modules_to_save.sst2.weight"
            lora = name.replace(".weight", ".sst2.weight")
            state[lora if "lora_" in name else head] = state.pop(name)

    made.edit(respell)
    close(alone(headswap.load(made.folder), rows()), alone(made.model, rows()))


def test_a_pickled_adapter_is_read(tmp_path: Path) -> None:
    made = Trained(tmp_path, "llama")
    file = made.folder / "adapter_model.safetensors"
    torch.save(load_file(file), made.folder / "adapter_model.bin")
    file.unlink()
    close(alone(headswap.load(made.folder), rows()), alone(made.model, rows()))


@pytest.mark.parametrize("targets", [TARGETS, r"layers\.\d+\.self_attn\.q_proj"])
def test_an_adapter_of_the_bare_backbone_is_put_under_its_prefix(
    tmp_path: Path, targets: Any
) -> None:
    made = Trained(tmp_path, "llama", None, target_modules=targets)
    model = headswap.load(made.base, adapter=made.folder, task="embed")
    ids = torch.tensor([rows()[0]])
    with torch.no_grad():
        close(model(input_ids=ids).last_hidden_state, made.model(input_ids=ids)[0])


@pytest.mark.parametrize("more", [{"use_dora": True}, {"use_rslora": True},
                                  {"target_modules": "all-linear"}, {"bias": "all"}])  # fmt: skip
def test_variants_of_lora_are_merged_by_peft(tmp_path: Path, more: Any) -> None:
    made = Trained(tmp_path, "roberta", **more)
    close(alone(headswap.load(made.folder), rows()), alone(made.model, rows()))


def test_a_backbone_in_half_precision_keeps_an_adapter_s_head_in_fp32(tmp_path: Path) -> None:
    made = Trained(tmp_path, "llama")
    model = headswap.load(made.folder, dtype=torch.bfloat16)
    assert model.score.weight.dtype == torch.float32
    assert torch.equal(model.score.weight, load_file(made.folder / "adapter_model.safetensors")[
        "base_model.model.score.weight"])  # fmt: skip
    torch.testing.assert_close(alone(model, rows()), alone(made.model, rows()), atol=0.1, rtol=0.1)


# -- labels -----------------------------------------------------------------------------------


def test_names_come_from_the_config_beside_the_adapter(tmp_path: Path) -> None:
    made = Trained(tmp_path, "bert", base={"num_labels": 2})
    made.edit_json("config.json", id2label={str(i): n for i, n in enumerate(LABELS)},
                   label2id={n: i for i, n in enumerate(LABELS)},
                   problem_type="multi_label_classification")  # fmt: skip
    model = headswap.load(made.folder)
    assert model.config.id2label == dict(enumerate(LABELS))
    assert model.config.problem_type == "multi_label_classification"
    made.edit_json("config.json", label2id={n: 4 - i for i, n in enumerate(LABELS)})
    with pytest.raises(headswap.LabelError, match="red"):
        headswap.load(made.folder)
    made.edit_json("config.json", id2label={"0": "a", "1": "b", "2": "c"}, label2id=None)
    with pytest.raises(headswap.LabelError, match=r"classifier\.weight has 5 rows.* 3 labels"):
        headswap.load(made.folder)


def test_names_of_the_base_hold_only_where_the_counts_agree(tmp_path: Path) -> None:
    names = {"id2label": dict(enumerate("abc")), "label2id": {n: i for i, n in enumerate("abc")}}
    made = Trained(tmp_path, "bert", labels=3, base=names, seed=3)
    assert headswap.load(made.folder).config.id2label == dict(enumerate("abc"))
    made = Trained(tmp_path, "bert", labels=5, seed=5)
    with pytest.raises(headswap.LabelError, match=r"classifier\.weight has 5 rows.* 3 labels"):
        headswap.load(made.folder)
    model = headswap.load(made.folder, id2label=LABELS)
    assert model.config.id2label == dict(enumerate(LABELS))
    close(alone(model, rows()), alone(made.model, rows()))


def test_a_merged_checkpoint_is_a_stock_one_with_equal_logits(tmp_path: Path) -> None:
    made = Trained(tmp_path, "llama")
    report = headswap.convert_checkpoint(made.folder, tmp_path / "out", id2label=LABELS,
                                         problem_type="multi_label_classification")  # fmt: skip
    assert report.stock
    assert any("adapter" in note for note in report.notes)
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    close(alone(stock.eval(), rows()), alone(made.model, rows()))
    assert stock.config.id2label == dict(enumerate(LABELS))
    assert stock.config.problem_type == "multi_label_classification"
    assert stock.config.architectures == ["LlamaForSequenceClassification"]


def test_verify_compares_with_the_unmerged_adapter(tmp_path: Path) -> None:
    made = Trained(tmp_path, "llama")
    report = verify(made.folder)
    assert report.ok
    assert report.reference == "LlamaForSequenceClassification"


# -- label tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lora", [
    {"target_modules": ["q_proj", "lm_head"]},
    {"target_modules": ["q_proj", "embed_tokens"]},
    {"modules_to_save": ["lm_head"]},
    {"modules_to_save": ["embed_tokens"]},
    {"modules_to_save": ["embed_tokens", "lm_head"]},
    {"trainable_token_indices": [7, 9]},
    {"target_modules": ["q_proj", "lm_head"], "ensure_weight_tying": True},
], ids=str)  # fmt: skip
def test_label_tokens_are_read_after_the_adapter(tmp_path: Path, lora: Any, tied: bool) -> None:
    made = Trained(tmp_path, "llama", "CAUSAL_LM", base={"tie_word_embeddings": tied}, **lora)
    wanted = alone(made.model, rows()[:1])[:, -1, [7, 9]]
    plain = alone(headswap.load(made.base, label_tokens=[7, 9]), rows()[:1])
    model = headswap.load(made.folder, label_tokens=[7, 9])
    close(alone(model, rows()[:1]), wanted)
    assert (plain - wanted).abs().max() > 1e-2
    assert headswap.plan(made.folder, label_tokens=[7, 9]).ok


# -- what does not fit ------------------------------------------------------------------------


def test_a_missing_head_is_named_for_an_adapter_too(tmp_path: Path) -> None:
    made = Trained(tmp_path, "llama")
    made.edit(lambda state: state.pop("base_model.model.score.weight"))
    with pytest.raises(headswap.MissingHeadError, match=r"score\.weight"):
        headswap.load(made.folder, num_labels=5)


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    made = Trained(tmp_path, "llama")
    stray = "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"
    made.edit(lambda state: state.update({stray: torch.zeros(8, 32)}))
    with pytest.raises(headswap.WeightError, match=r"layers\.7\.self_attn\.q_proj") as caught:
        headswap.load(made.folder)
    assert caught.value.unexpected == (stray,)
    plan = headswap.plan(made.folder)
    assert not plan.ok
    assert [t.name for t in plan.tensors if t.action == "unexpected"] == [stray]


@pytest.mark.parametrize("lora", [{"modules_to_save": ["lm_head"]},
                                  {"target_modules": ["q_proj", "lm_head"]},
                                  {"target_modules": ["lm_head"]}], ids=str)  # fmt: skip
def test_a_trained_head_that_the_target_lacks_is_an_error(tmp_path: Path, lora: Any) -> None:
    made = Trained(tmp_path, "llama", "CAUSAL_LM", **lora)
    for options in ({"task": "embed"}, {"num_labels": 2, "allow_untrained_head": True}):
        with pytest.raises(headswap.WeightError, match=r"lm_head.*label_tokens"):
            headswap.load(made.folder, **options)
        assert not headswap.plan(made.folder, **options).ok
    made = Trained(tmp_path, "llama", seed=2)
    with pytest.raises(headswap.WeightError, match=r"no place for base_model\.model\.score"):
        headswap.load(made.folder, task="embed")


def test_a_tensor_that_should_be_there_is_named(tmp_path: Path) -> None:
    made = Trained(tmp_path, "llama")
    gone = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    made.edit(lambda state: state.pop(gone))
    with pytest.raises(headswap.WeightError, match=r"layers\.1\.self_attn\.q_proj\.lora_B"):
        headswap.load(made.folder)
    assert not headswap.plan(made.folder).ok


def test_another_base_s_shapes_are_refused(tmp_path: Path) -> None:
    made = Trained(tmp_path, "llama")
    tiny("llama", hidden_size=16).save_pretrained(tmp_path / "other")
    with pytest.raises(headswap.WeightError, match=r"score\.weight|q_proj"):
        headswap.load(tmp_path / "other", adapter=made.folder)


def test_a_base_that_can_t_be_had_is_named(tmp_path: Path) -> None:
    made = Trained(tmp_path, "llama")
    for base in (str(tmp_path / "nowhere"), str(made.folder), None):
        made.edit_json(base_model_name_or_path=base)
        with pytest.raises(headswap.CheckpointError, match="adapter="):
            headswap.load(made.folder)
    with pytest.raises(headswap.CheckpointError, match="holds an adapter"):
        headswap.load(made.folder, adapter=made.folder)
    with pytest.raises(headswap.CheckpointError, match="no adapter_config"):
        headswap.load(made.base, adapter=made.base)


def test_a_whole_model_beside_an_adapter_is_refused(tmp_path: Path) -> None:
    # transformers reads the adapter's base there, and not the weights that lie in the folder.
    made = Trained(tmp_path, "llama")
    tiny("llama").save_pretrained(made.folder)
    with pytest.raises(headswap.CheckpointError, match="whole model"):
        headswap.load(made.folder, num_labels=2, allow_untrained_head=True)


def test_what_a_newer_peft_would_do_is_not_left_out(tmp_path: Path) -> None:
    made = Trained(tmp_path, "llama")
    made.edit_json(use_something_new=True)
    with pytest.raises(headswap.CheckpointError, match="use_something_new"):
        headswap.load(made.folder)


def test_a_prompt_is_not_merged(tmp_path: Path) -> None:
    base = tiny("llama")
    base.save_pretrained(tmp_path / "base")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "prompt")
    with pytest.raises(headswap.ConversionError, match="PROMPT_TUNING"):
        headswap.load(tmp_path / "base", adapter=tmp_path / "prompt", label_tokens=[7, 9])


# -- PEFT on our models -----------------------------------------------------------------------


def ours(folder: Path, model_type: str, labels: int) -> Any:
    return headswap.load(folder, task="classify", num_labels=labels, allow_untrained_head=True)


@pytest.mark.parametrize("model_type", ["llama", "roberta"])
def test_an_adapter_trained_on_our_model_comes_back(tmp_path: Path, model_type: str) -> None:
    tiny(model_type, BASES[model_type]).save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(task_type="SEQ_CLS", target_modules=TARGETS)
    model = peft.get_peft_model(ours(tmp_path / "base", model_type, 3), lora)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model.train()
    model(**padded(rows(), [0] * 4, 12), labels=torch.tensor([0, 1, 2, 1])).loss.backward()
    optimizer.step()
    wanted = alone(model.eval(), rows())
    model.save_pretrained(tmp_path / "adapter")
    fresh = ours(tmp_path / "base", model_type, 3)
    assert (alone(fresh, rows()) - wanted).abs().max() > 1e-3
    again = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    close(alone(again, rows()), wanted)
    close(alone(headswap.load(tmp_path / "adapter"), rows()), wanted)


@pytest.mark.parametrize("model_type", ["llama", "bert", "roberta"])
def test_two_heads_over_one_backbone_are_chosen_by_call(tmp_path: Path, model_type: str) -> None:
    first = Trained(tmp_path, model_type, labels=3, base={"num_labels": 3}, seed=1)
    second = Trained(tmp_path, model_type, labels=3, seed=2)
    wanted = {"a": alone(first.model, rows()), "b": alone(second.model, rows())}
    model = ours(first.base, model_type, 3)
    untouched = alone(model, rows())
    backbone = {id(p) for p in model.backbone.parameters()}
    both = peft.PeftModel.from_pretrained(model, first.folder, adapter_name="a")
    both.load_adapter(second.folder, "b")
    assert backbone <= {id(p) for p in both.parameters()}
    more = sum(p.numel() for p in both.parameters() if id(p) not in backbone)
    assert more < sum(p.numel() for p in model.backbone.parameters()) / 2
    for name in ("a", "b", "a"):
        both.set_adapter(name)
        close(alone(both, rows()), wanted[name])
    with both.disable_adapter():
        close(alone(both, rows()), untouched)


@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_rows_of_one_batch_go_through_their_own_adapters(tmp_path: Path, model_type: str) -> None:
    first = Trained(tmp_path, model_type, labels=3, base={"num_labels": 3}, seed=1)
    second = Trained(tmp_path, model_type, labels=3, seed=2)
    wanted = torch.stack([alone(made.model, rows()) for made in (first, second)])
    both = peft.PeftModel.from_pretrained(ours(first.base, model_type, 3), first.folder, "a")
    both.load_adapter(second.folder, "b")
    for chosen in ([0, 1, 1, 0], [1, 0, 1, 1]):
        with torch.no_grad():
            found = both(**padded(rows(), [2, 0, 1, 0], 14),
                         adapter_names=["ab"[index] for index in chosen]).logits  # fmt: skip
        close(found, wanted[chosen, range(4)])


def test_a_head_of_several_layers_is_not_mixed_in_one_batch(tmp_path: Path) -> None:
    first, second = (Trained(tmp_path, "roberta", labels=3, seed=seed) for seed in (1, 2))
    both = peft.PeftModel.from_pretrained(ours(first.base, "roberta", 3), first.folder, "a")
    both.load_adapter(second.folder, "b")
    batch = padded(rows(), [0] * 4, 12)
    with torch.no_grad():
        close(both(**batch).logits, alone(first.model, rows()))
    with pytest.raises(headswap.UnsupportedHeadError, match=r"classifier.*set_adapter"):
        both(**batch, adapter_names=["a", "b", "b", "a"])


def test_heads_of_different_sizes_share_one_backbone(tmp_path: Path) -> None:
    made = [Trained(tmp_path, "llama", labels=labels, seed=labels) for labels in (2, 5)]
    causal = transformers.AutoModelForCausalLM.from_pretrained(made[0].base).eval()
    models = [
        peft.PeftModel.from_pretrained(headswap.as_seq_cls_model(causal, num_labels=n), m.folder)
        for n, m in zip((2, 5), made, strict=True)
    ]
    own = {p.data_ptr() for p in causal.model.parameters()}
    assert all(own <= {p.data_ptr() for p in model.parameters()} for model in models)
    for model, m in zip(models, made, strict=True):
        close(alone(model, rows()), alone(m.model, rows()))
