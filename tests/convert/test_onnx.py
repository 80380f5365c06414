# SPDX-License-Identifier: Apache-2.0
"""ONNX initialisers as a source: mapped to parameters by name, or refused by name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from tiny_models import alone, rows, tiny

import headswap
from headswap.heads import release
from headswap.registry.errors import CheckpointError, WeightError

MORE = {"distilbert": {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 64}}
SEQ = "AutoModelForSequenceClassification"


class _Logits(torch.nn.Module):
    """What exporters trace: tensors in, logits out; the model's names get the prefix `base.`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base = model

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        return self.base(input_ids=input_ids, attention_mask=attention_mask).logits


def _export(folder: Path, model: Any, file: str = "model.onnx") -> Path:
    model.config.save_pretrained(folder)
    (folder / file).parent.mkdir(exist_ok=True)
    ids = torch.tensor([rows()[0]])
    names = ["input_ids", "attention_mask"]
    axes = {name: {0: "batch", 1: "length"} for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _Logits(model).eval(), (ids, torch.ones_like(ids)), str(folder / file),
            input_names=names, dynamic_axes=axes, dynamo=False,
        )  # fmt: skip
    return folder / file


@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert", "gpt2", "llama"])
def test_an_exported_classifier_scores_as_its_source(tmp_path: Path, model_type: str) -> None:
    if model_type in ("gpt2", "llama") and release() < 5:
        pytest.skip("torch.jit cannot trace 4.57's causal mask")
    model = tiny(model_type, SEQ, num_labels=3, **MORE.get(model_type, {}))
    file = _export(tmp_path, model)
    plan = headswap.plan(file)
    assert plan.ok, plan.problems
    assert headswap.plan(tmp_path).ok
    torch.testing.assert_close(
        alone(headswap.load(tmp_path), rows()), alone(model, rows()), atol=1e-5, rtol=0
    )


def test_the_graph_itself_gives_the_same_logits(tmp_path: Path) -> None:
    from onnx.reference import ReferenceEvaluator

    # onnx's evaluator cannot run BERT's segment ids (a gather with an index shorter than its data)
    file = _export(tmp_path, tiny("distilbert", SEQ, num_labels=3, **MORE["distilbert"]))
    found = headswap.load(file)
    run = ReferenceEvaluator(str(file)).run
    for row in rows():
        ids = np.array([row])
        (wanted,) = run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
        torch.testing.assert_close(alone(found, [row]), torch.from_numpy(wanted), atol=1e-5, rtol=0)


def test_a_graph_in_a_folder_beside_the_config_becomes_a_stock_checkpoint(tmp_path: Path) -> None:
    model = tiny("bert", SEQ, num_labels=3)
    (tmp_path / "in").mkdir()
    _export(tmp_path / "in", model, "onnx/model.onnx")
    headswap.convert_checkpoint(tmp_path / "in", tmp_path / "out")
    again = headswap.load(tmp_path / "out")
    torch.testing.assert_close(alone(again, rows()), alone(model, rows()), atol=1e-5, rtol=0)


def _quantise(file: Path) -> dict[str, torch.Tensor]:
    """Rewrite `file`'s linear layers as onnxruntime does (the Gemm of a pooler or head becomes a
    MatMul, its matrix turned); the plain weights `[out, in]` by parameter."""
    model = onnx.load(str(file))
    arrays = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    plain = {}
    for node in model.graph.node:
        if node.op_type not in ("MatMul", "Gemm") or node.input[1] not in arrays:
            continue
        own, gemm = node.input[1], node.op_type == "Gemm"
        matrix = arrays.pop(own).T if gemm else arrays.pop(own)
        low, high = np.minimum(matrix.min(0), 0), np.maximum(matrix.max(0), 0)
        scale = ((high - low) / 255).astype(np.float32)
        zero = np.clip(np.round(-low / scale), 0, 255).astype(np.uint8)
        small = np.clip(np.round(matrix / scale) + zero, 0, 255).astype(np.uint8)
        arrays |= {f"{own}_quantized": small, f"{own}_scale": scale, f"{own}_zero_point": zero}
        module = node.name.removeprefix("/base/").rpartition("/")[0].replace("/", ".")
        turned = torch.from_numpy((small.astype(np.float32) - zero) * scale).t()
        plain[f"{module}.weight"] = turned
        node.name += "_MatMul_quant" if gemm else "_quant"
        node.op_type = "MatMulInteger"
        node.input[1] = f"{own}_quantized"
    del model.graph.initializer[:]
    made = [numpy_helper.from_array(np.ascontiguousarray(a), name) for name, a in arrays.items()]
    model.graph.initializer.extend(made)
    onnx.save(model, str(file))
    return plain


def test_quantised_matrices_are_dequantised(tmp_path: Path) -> None:
    model = tiny("bert", SEQ, num_labels=3)
    file = _export(tmp_path, model)
    plain = _quantise(file)
    assert {"bert.pooler.dense.weight", "classifier.weight"} <= set(plain)
    assert len(plain) == 14
    assert not model.load_state_dict(plain, strict=False).unexpected_keys
    found = headswap.load(file)
    torch.testing.assert_close(alone(found, rows()), alone(model, rows()), atol=1e-5, rtol=0)


def test_a_matrix_that_no_node_places_is_refused_by_name(tmp_path: Path) -> None:
    file = _export(tmp_path, tiny("bert", SEQ, num_labels=3))
    model = onnx.load(str(file))
    node = next(n for n in model.graph.node if "layer.1/output/dense/MatMul" in n.name)
    own, node.name = node.input[1], "MatMul_7"
    onnx.save(model, str(file))
    assert not headswap.plan(file).ok
    with pytest.raises(
        WeightError, match=f"missing bert.encoder.layer.1.output.dense.weight.*{own}"
    ):
        headswap.load(file)


def test_two_tensors_for_one_parameter_are_refused(tmp_path: Path) -> None:
    file = _export(tmp_path, tiny("bert", SEQ, num_labels=3))
    model = onnx.load(str(file))
    first, other = (next(n for n in model.graph.node if f"layer.{i}/output/dense/MatMul" in n.name)
                    for i in (0, 1))  # fmt: skip
    other.name = first.name
    onnx.save(model, str(file))
    with pytest.raises(CheckpointError, match=r"two different tensors for bert.encoder.layer.0"):
        headswap.load(file)


def test_several_files_and_a_missing_package_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _export(tmp_path, tiny("bert", SEQ, num_labels=3))
    (tmp_path / "other.onnx").write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match=r"2 ONNX files; name one of: model.onnx, other.onnx"):
        headswap.load(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(CheckpointError, match="pip install onnx"):
        headswap.load(file)
