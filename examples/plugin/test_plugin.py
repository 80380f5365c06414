# SPDX-License-Identifier: Apache-2.0
"""Run after `pip install ./examples/plugin`: headswap serves what the plugin registers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from headswap_toy.modeling import ToyConfig, ToyForCausalLM

import headswap
from headswap.convert.testing import AdapterConformance

IDS = torch.tensor([[5, 6, 7, 8]])
PADDED = torch.tensor([[0, 0, 5, 6, 7, 8]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1]])


class TestToy(AdapterConformance):
    """What headswap asks of every architecture, asked of the toy."""

    def source(self) -> ToyForCausalLM:
        torch.manual_seed(1)
        return ToyForCausalLM(ToyConfig()).eval()


class TestToyHead(TestToy):
    """The same for the plugin's own head."""

    head = "toy-mlp"

    def reference(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        state = model.backbone(ids).last_hidden_state[:, -1]
        head = model.toy_head
        logits: torch.Tensor = head.outer(torch.nn.functional.gelu(head.inner(state)))
        return logits


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    ToyForCausalLM(ToyConfig()).save_pretrained(tmp_path / "toy")
    return tmp_path / "toy"


def check_padding(model: torch.nn.Module) -> None:
    with torch.no_grad():
        alone = model(input_ids=IDS).logits
        padded = model(input_ids=PADDED, attention_mask=MASK).logits
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=0)


def test_label_tokens_give_the_toys_own_token_logits(folder: Path, tmp_path: Path) -> None:
    model = headswap.load(folder, label_tokens=[11, 42])
    with torch.no_grad():
        wanted = ToyForCausalLM.from_pretrained(folder)(IDS).logits[:, -1, [11, 42]]
        found = model(input_ids=IDS).logits
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    check_padding(model)
    headswap.convert_checkpoint(folder, tmp_path / "out", label_tokens=[11, 42])
    again = headswap.load(tmp_path / "out")
    torch.testing.assert_close(again(input_ids=IDS).logits, wanted, atol=1e-5, rtol=0)


def test_a_score_head_on_the_toy(folder: Path) -> None:
    with pytest.raises(headswap.MissingHeadError, match=r"score\.weight"):
        headswap.load(folder, num_labels=3)
    model = headswap.load(folder, num_labels=3, allow_untrained_head=True)
    assert model(input_ids=IDS).logits.shape == (1, 3)
    check_padding(model)


def test_the_plugins_own_head(folder: Path, tmp_path: Path) -> None:
    model = headswap.load(folder, num_labels=3, head="toy-mlp", allow_untrained_head=True)
    rows = model.rows({"input_ids": IDS}).values
    head = model.toy_head
    wanted = head.outer(torch.nn.functional.gelu(head.inner(rows)))
    torch.testing.assert_close(model(input_ids=IDS).logits, wanted, atol=1e-5, rtol=0)
    check_padding(model)
    model.save_pretrained(tmp_path / "out")
    again = headswap.load(tmp_path / "out")
    torch.testing.assert_close(again(input_ids=IDS).logits, wanted, atol=1e-5, rtol=0)


def test_the_plugins_own_suffix_rule() -> None:
    found = headswap.resolve("ToyForScoring")
    assert found.task == "classify"
    assert found.entry.owner == "headswap-toy"


def python(code: str) -> str:
    """What `code` prints in a fresh process, where nobody has imported the plugin."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_another_process_loads_a_checkpoint_with_nothing_to_import(folder: Path) -> None:
    code = f"import headswap; print(type(headswap.load({str(folder)!r}, label_tokens=[1, 2])))"
    assert "ToyForSequenceClassification" in python(code)


def test_finding_the_plugin_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from headswap.registry import global_registry as g;"
        "print(g.resolve('ToyForScoring').entry.owner, {'torch', 'transformers'} & {*sys.modules})"
    )
    assert python(code) == "headswap-toy set()"


def test_the_toy_generates_what_its_logits_say(folder: Path) -> None:
    toy = ToyForCausalLM.from_pretrained(folder).eval()
    wanted = IDS
    with torch.no_grad():
        for _ in range(4):
            wanted = torch.cat([wanted, toy(wanted).logits[:, -1:].argmax(-1)], dim=1)
    found = toy.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(found, wanted)
