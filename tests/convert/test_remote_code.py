# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that bring their own code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import headswap

CODE = Path(__file__).parents[2] / "examples" / "plugin" / "headswap_toy" / "modeling.py"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example plugin's model, as a checkpoint that carries its code."""
    import json

    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    target = tmp_path / "remote"
    target.mkdir()
    own = (
        CODE.read_text()
        .replace("ToyForCausalLM", "FarForCausalLM")
        .replace('model_type = "toy"', 'model_type = "far"')
    )
    (target / "modeling_far.py").write_text(own)
    cls = get_class_from_dynamic_module("modeling_far.FarForCausalLM", str(target))
    torch.manual_seed(0)
    cls(cls.config_class()).save_pretrained(target)
    config = json.loads((target / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "modeling_far.ToyConfig",
        "AutoModelForCausalLM": "modeling_far.FarForCausalLM",
    }
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_code_in_a_checkpoint_does_not_run_without_consent(folder: Path) -> None:
    (folder / "modeling_far.py").write_text("raise SystemExit('ran')")
    with pytest.raises(headswap.RemoteCodeError, match=r"FarForCausalLM.*trust_remote_code=True"):
        headswap.load(folder, label_tokens=[11, 42])


def test_with_consent_it_is_served_like_any_causal_class(folder: Path) -> None:
    model = headswap.load(folder, label_tokens=[11, 42], trust_remote_code=True)
    ids = torch.tensor([[5, 6, 7, 8]])
    from transformers import AutoModelForCausalLM

    own = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        wanted, found = own(ids).logits[:, -1, [11, 42]], model(ids).logits
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    plan = headswap.plan(folder, label_tokens=[11, 42], trust_remote_code=True)
    assert plan.resolution.rule == "remote code"
    assert plan.ok
