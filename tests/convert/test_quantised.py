# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints, made here with the field's own libraries: dequantised, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import alone, rows, tiny

import headswap
from headswap.convert import verify
from headswap.registry.errors import CheckpointError, UnsupportedHeadError

SEQ = "AutoModelForSequenceClassification"
TOKENS = [7, 41, 9]
INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "packed int8": ("pack-quantized", INT8),
    "int8": ("int-quantized", INT8),
    "packed int4, groups, zero points": (
        "pack-quantized",
        {**INT8, "num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
    ),
    "fp8, one scale": ("float-quantized", {**INT8, "type": "float", "strategy": "tensor"}),
    "fp8, a scale a row": ("float-quantized", {**INT8, "type": "float"}),
}
METHODS = [*FORMATS, "fine-grained fp8", "torchao int8"]


def _rewrite(folder: Path, tensors: dict[str, Any], settings: Any, **about: str) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", **about})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def _linear(model: Any, skip: tuple[str, ...]) -> list[str]:
    return [name for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and name not in skip]  # fmt: skip


def _ranges(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if args.strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    groups = weight.reshape(len(weight), -1, args.group_size or weight.shape[1])
    return groups.amin(-1), groups.amax(-1)


def _compress(folder: Path, model: Any, kind: str, skip: tuple[str, ...]) -> dict[str, Any]:
    """Store `folder`'s weights as compressed-tensors does; the plain weights they stand for."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
    from compressed_tensors.quantization import QuantizationScheme as Scheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    form, words = FORMATS[kind]
    args = QuantizationArgs(**words)
    scheme = Scheme(targets=["Linear"], weights=args, format=form)
    stored, plain = load_file(folder / "model.safetensors"), {}
    for name in _linear(model, skip):
        weight = stored.pop(f"{name}.weight")
        scale, zero = calculate_qparams(*_ranges(weight, args), args)
        plain[f"{name}.weight"] = fake_quantize(weight, scale, zero, args)
        parts = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        packed = BaseCompressor.get_value_from_registry(form).compress(parts, scheme)
        stored |= {f"{name}.{part}": tensor for part, tensor in packed.items()}
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=form, ignore=list(skip),
                                quantization_status="compressed")  # fmt: skip
    _rewrite(folder, stored, json.loads(config.model_dump_json()))
    return plain


def _fp8(folder: Path, model: Any, block: list[int], skip: tuple[str, ...]) -> dict[str, Any]:
    """The same as transformers' fine-grained fp8, block by block (the last ones may be smaller)."""
    stored, plain = load_file(folder / "model.safetensors"), {}
    for name in _linear(model, skip):
        weight = stored[f"{name}.weight"]
        small, back = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), weight.clone()
        counts = [-(-size // step) for size, step in zip(weight.shape, block, strict=True)]
        scales = torch.empty(counts)
        for i in range(counts[0]):
            for j in range(counts[1]):
                at = (slice(i * block[0], (i + 1) * block[0]),
                      slice(j * block[1], (j + 1) * block[1]))  # fmt: skip
                scales[i, j] = weight[at].abs().max() / 448
                small[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
                back[at] = small[at].float() * scales[i, j]
        stored |= {f"{name}.weight": small, f"{name}.weight_scale_inv": scales}
        plain[f"{name}.weight"] = back
    settings = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic",
                "modules_to_not_convert": list(skip)}  # fmt: skip
    _rewrite(folder, stored, settings)
    return plain


def _torchao(folder: Path, model: Any, skip: tuple[str, ...]) -> dict[str, Any]:
    """The same as torchao's weight-only int8, in safetensors."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    names = _linear(model, skip)
    quantize_(model, Int8WeightOnlyConfig(version=2), lambda _, name: name in names)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    stored, about = flatten_tensor_state_dict(state)
    _rewrite(folder, stored, {"quant_method": "torchao", "quant_type": {"default": {}}}, **about)
    return {f"{name}.weight": state[f"{name}.weight"].dequantize() for name in names}


def _make(
    folder: Path, kind: str, model_type: str, auto: str, skip: tuple[str, ...], **more: Any
) -> Any:
    """A quantised checkpoint in `folder`; the plain model with the weights that it stands for."""
    model = tiny(model_type, auto, **more)
    model.save_pretrained(folder)
    if kind in FORMATS:
        plain = _compress(folder, model, kind, skip)
    elif kind == "torchao int8":
        plain = _torchao(folder, tiny(model_type, auto, **more), skip)
    else:
        plain = _fp8(folder, model, [16, 12], skip)
    _, unexpected = model.load_state_dict(plain, strict=False)
    assert not unexpected
    return model


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_label_tokens_score_as_the_dequantised_causal_model(
    tmp_path: Path, kind: str, model_type: str
) -> None:
    lm = _make(tmp_path, kind, model_type, "AutoModelForCausalLM", ("lm_head",))
    plan = headswap.plan(tmp_path, label_tokens=TOKENS)
    assert plan.ok, plan.problems
    assert set(plan.counts()) == {"used", "derived"}
    assert any("14 weights dequantised" in note for note in plan.notes)
    stored = load_file(tmp_path / "model.safetensors")
    assert {tensor.name for tensor in plan.tensors if tensor.action == "used"} == set(stored)
    model = headswap.load(tmp_path, label_tokens=TOKENS)
    assert type(model.score) is torch.nn.Linear
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert getattr(model.config, "quantization_config", None) is None
    wanted = torch.cat([lm(input_ids=torch.tensor([row])).logits[:, -1, TOKENS] for row in rows()])
    torch.testing.assert_close(alone(model, rows()), wanted.detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", METHODS)
def test_packed_output_rows_are_dequantised(tmp_path: Path, kind: str) -> None:
    lm = _make(tmp_path, kind, "llama", "AutoModelForCausalLM", ())
    plan = headswap.plan(tmp_path, label_tokens=TOKENS)
    assert plan.ok, plan.problems
    model = headswap.load(tmp_path, label_tokens=TOKENS)
    torch.testing.assert_close(model.score.weight, lm.lm_head.weight[TOKENS], atol=1e-7, rtol=0)
    wanted = torch.cat([lm(input_ids=torch.tensor([row])).logits[:, -1, TOKENS] for row in rows()])
    torch.testing.assert_close(alone(model, rows()), wanted.detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize(
    ("model_type", "skip"),
    [("llama", ("score",)), ("qwen2", ()), ("bert", ("classifier",))],
    ids=["plain head", "quantised head", "encoder"],
)
def test_a_stored_head_scores_as_the_dequantised_classifier(
    tmp_path: Path, kind: str, model_type: str, skip: tuple[str, ...]
) -> None:
    reference = _make(tmp_path, kind, model_type, SEQ, skip, num_labels=4)
    plan = headswap.plan(tmp_path)
    assert plan.ok, plan.problems
    wanted = alone(reference, rows())
    for model in (headswap.load(tmp_path), type(headswap.load(tmp_path)).from_pretrained(tmp_path)):
        torch.testing.assert_close(alone(model.eval(), rows()), wanted, atol=1e-5, rtol=0)
        head = model.get_submodule(model.head_spec.output.path)
        assert type(head) is torch.nn.Linear
        assert head.weight.dtype == torch.float32


@pytest.mark.parametrize("kind", METHODS)
def test_a_quantised_source_is_written_as_a_plain_stock_checkpoint(
    tmp_path: Path, kind: str
) -> None:
    lm = _make(tmp_path / "in", kind, "llama", "AutoModelForCausalLM", ("lm_head",))
    report = headswap.convert_checkpoint(tmp_path / "in", tmp_path / "out", label_tokens=TOKENS)
    assert report.stock
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", dtype=torch.float32
    )
    wanted = torch.cat([lm(input_ids=torch.tensor([row])).logits[:, -1, TOKENS] for row in rows()])
    torch.testing.assert_close(alone(stock.eval(), rows()), wanted.detach(), atol=1e-5, rtol=0)


def test_the_written_dtype_is_the_one_asked_for(tmp_path: Path) -> None:
    _make(tmp_path / "in", "fine-grained fp8", "llama", "AutoModelForCausalLM", ("lm_head",))
    headswap.convert_checkpoint(
        tmp_path / "in", tmp_path / "out", label_tokens=TOKENS, dtype=torch.bfloat16
    )
    written = load_file(tmp_path / "out" / "model.safetensors")
    kept = {name: tensor.dtype for name, tensor in written.items()}
    assert kept.pop("score.weight") == torch.float32
    assert set(kept.values()) == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["packed int8", "fine-grained fp8", "torchao int8"])
def test_verify_holds_for_quantised_sources(tmp_path: Path, kind: str) -> None:
    _make(tmp_path, kind, "llama", "AutoModelForCausalLM", ("lm_head",))
    assert verify(tmp_path, label_tokens=TOKENS).ok


def test_equals_what_transformers_itself_dequantises(tmp_path: Path) -> None:
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("4.57 runs fine-grained fp8 on a GPU only")
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    _fp8(tmp_path, model, [16, 16], ("lm_head",))
    own = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float32,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
    ).eval()
    found = headswap.load(tmp_path, label_tokens=TOKENS)
    wanted = torch.cat([own(input_ids=torch.tensor([r])).logits[:, -1, TOKENS] for r in rows()])
    torch.testing.assert_close(alone(found, rows()), wanted.detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["packed int8", "int8"])
def test_a_model_that_unpacks_at_its_first_call_is_shared_unpacked(
    tmp_path: Path, kind: str
) -> None:
    _make(tmp_path, kind, "llama", "AutoModelForCausalLM", ("lm_head",))
    lm = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model = headswap.as_seq_cls_model(lm, label_tokens=TOKENS).eval()
    wanted = torch.cat([lm(input_ids=torch.tensor([row])).logits[:, -1, TOKENS] for row in rows()])
    torch.testing.assert_close(alone(model, rows()), wanted.detach(), atol=1e-5, rtol=0)


def test_a_model_with_packed_output_rows_is_refused(tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    lm = tiny("llama")
    quantize_(lm, Int8WeightOnlyConfig(version=2))
    with pytest.raises(UnsupportedHeadError, match="output embedding are quantised"):
        headswap.as_seq_cls_model(lm, label_tokens=TOKENS)


def test_a_pickled_torchao_checkpoint_is_dequantised(tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    lm = tiny("llama")
    lm.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = _linear(lm, ("lm_head",))
    quantize_(lm, Int8WeightOnlyConfig(version=2), lambda _, name: name in names)
    state = {name: tensor.detach() for name, tensor in lm.state_dict().items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "torchao", "quant_type": {"default": {}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = headswap.load(tmp_path, label_tokens=TOKENS)
    assert {type(p) for p in found.parameters()} == {torch.nn.Parameter}
    wanted = torch.cat([lm(input_ids=torch.tensor([row])).logits[:, -1, TOKENS] for row in rows()])
    torch.testing.assert_close(alone(found, rows()), wanted.detach(), atol=1e-5, rtol=0)


def _say(folder: Path, settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": settings}
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"gptq \(4 bits\).*pip install gptqmodel"),
        ({"quant_method": "awq", "bits": 4}, r"awq.*pip install gptqmodel"),
        ({"quant_method": "newest"}, "quantised by newest.*It reads compressed-tensors, fp8"),
    ],
)
def test_a_method_that_headswap_does_not_unpack_is_refused_by_name(
    saved: Any, settings: Any, words: str
) -> None:
    folder = saved("llama")
    _say(folder, settings)
    for run in (headswap.plan, headswap.load):
        with pytest.raises(CheckpointError, match=words):
            run(folder, label_tokens=TOKENS)


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _make(tmp_path, "packed int8", "llama", "AutoModelForCausalLM", ("lm_head",))
    monkeypatch.setitem(__import__("sys").modules, "compressed_tensors", None)
    with pytest.raises(CheckpointError, match="pip install compressed-tensors"):
        headswap.plan(tmp_path, label_tokens=TOKENS)


@pytest.mark.parametrize("label_tokens", [None, TOKENS])
def test_packed_rows_that_no_settings_explain_are_refused_by_name(
    tmp_path: Path, label_tokens: Any
) -> None:
    _make(tmp_path, "packed int8", "llama", "AutoModelForCausalLM", ())
    _say(tmp_path, None)
    with pytest.raises(CheckpointError, match=r"weight_\w+, a part of a quantised weight"):
        headswap.plan(tmp_path, label_tokens=label_tokens, allow_untrained_head=True)


def test_packed_rows_without_their_scale_are_refused_by_name(tmp_path: Path) -> None:
    _make(tmp_path, "packed int8", "llama", "AutoModelForCausalLM", ())
    stored = load_file(tmp_path / "model.safetensors")
    del stored["lm_head.weight_scale"]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lm_head.weight_packed .*without its other parts"):
        headswap.load(tmp_path, label_tokens=TOKENS)


def test_scales_that_do_not_fit_their_weight_are_refused_by_name(tmp_path: Path) -> None:
    _make(tmp_path, "fine-grained fp8", "llama", "AutoModelForCausalLM", ("lm_head",))
    config = json.loads((tmp_path / "config.json").read_text())
    _say(tmp_path, {**config["quantization_config"], "weight_block_size": [4, 4]})
    with pytest.raises(CheckpointError, match=r"proj.weight: scales .* in blocks of \[4, 4\]"):
        headswap.load(tmp_path, label_tokens=TOKENS)


def test_weights_that_are_only_marked_as_quantised_are_refused(tmp_path: Path) -> None:
    _make(tmp_path, "int8", "llama", "AutoModelForCausalLM", ("lm_head",))
    stored = load_file(tmp_path / "model.safetensors")
    stored = {name: t.float() if t.dtype == torch.int8 else t for name, t in stored.items()}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="it is not compressed"):
        headswap.plan(tmp_path, label_tokens=TOKENS)


def test_activation_scales_are_dropped_with_a_reason(tmp_path: Path) -> None:
    lm = _make(tmp_path, "fp8, one scale", "llama", "AutoModelForCausalLM", ("lm_head",))
    stored = load_file(tmp_path / "model.safetensors")
    extra = "model.layers.0.self_attn.q_proj.input_scale"
    save_file({**stored, extra: torch.ones(1)}, tmp_path / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    plan = headswap.plan(tmp_path, label_tokens=TOKENS)
    (dropped,) = (tensor for tensor in plan.tensors if tensor.action == "dropped")
    assert (dropped.name, plan.ok) == (extra, True)
    assert "activations, which run unquantised" in dropped.reason
    found = headswap.load(tmp_path, label_tokens=TOKENS)
    wanted = torch.cat([lm(input_ids=torch.tensor([row])).logits[:, -1, TOKENS] for row in rows()])
    torch.testing.assert_close(alone(found, rows()), wanted.detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "llama"])
def test_quantising_while_loading_leaves_the_head_plain(saved: Any, model_type: str) -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    folder = saved(model_type, SEQ, num_labels=3)
    cls = type(headswap.load(folder))
    asked = transformers.TorchAoConfig(Int8WeightOnlyConfig(version=2))
    model = cls.from_pretrained(folder, quantization_config=asked, dtype=torch.float32)
    for layer in model.head_spec.stored:
        assert type(model.get_submodule(layer.path).weight) is torch.nn.Parameter
    packed = [n for n, p in model.named_parameters() if type(p) is not torch.nn.Parameter]
    assert packed
    assert asked.modules_to_not_convert is None
