# SPDX-License-Identifier: Apache-2.0
"""Every family's graphs against the card's rules; what is found stands in `rules_found.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from spyre_models import FAMILIES, MAJOR, causal, converted, expected, greedy
from tiny_models import rows

from headswap.spyre.errors import RuleError, RuleWarning
from headswap.spyre.executor import Executor

FOUND = Path(__file__).with_name("rules_found.json")
GROUPED = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi", "granite",
           "gpt_oss")  # fmt: skip
SIZES = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 128}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 128, "n_head": 2, "n_inner": 128},
    "opt": {"word_embed_proj_dim": 128, "ffn_dim": 128},
    "distilbert": {"dim": 128, "hidden_dim": 128, "n_heads": 2},
}


def model(kind: str) -> Any:
    """Heads of 64, everything else in whole sticks, as the checkpoints that people run have."""
    more = {"num_key_value_heads": 1, "head_dim": 64} if kind in GROUPED else {}
    return converted(kind, **SIZES, **more, **OWN_SIZES.get(kind, {}))


def found(executor: Executor) -> dict[str, str]:
    """Each rule that is broken, with the gravest severity."""
    seen: dict[str, str] = {}
    for finding in executor.report()["rules"]["findings"]:
        if seen.get(finding["rule"]) != "error":
            seen[finding["rule"]] = finding["severity"]
    return seen


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_breaks_the_rules_that_are_written_down_and_no_other(kind: str) -> None:
    known = json.loads(FOUND.read_text("utf-8"))
    executor = Executor(model(kind), backend="checked", rules="record", shapes=[(2, 64)],
                        dtype=torch.float16)  # fmt: skip
    seen = found(executor.warmup())
    listed = known["families"][kind]
    assert seen == (listed["both"] if "both" in listed else listed[str(MAJOR)])
    assert set(seen) <= set(known["reasons"])


@pytest.mark.parametrize("kind", ["bert", "llama", "gpt2"])
def test_a_checked_model_gives_its_own_numbers(kind: str) -> None:
    ids = rows((5, 61, 90))
    executor = Executor(converted(kind), backend="checked", rules="record",
                        shapes=[(2, 64), (1, 128)])  # fmt: skip
    torch.testing.assert_close(
        executor.logits(ids), expected(converted(kind), ids), atol=1e-5, rtol=0
    )
    assert executor.report()["compiles"] == 2


def test_findings_raise_warn_or_are_kept() -> None:
    strict = Executor(converted("llama"), backend="checked", shapes=[(1, 64)])
    with pytest.raises(RuleError, match="breaks rules of spyre"):  # fp32 products
        strict.warmup()
    with pytest.warns(RuleWarning):
        Executor(converted("llama"), backend="checked", rules="warn", shapes=[(1, 64)]).warmup()
    clean = Executor(model("gpt2"), backend="checked", shapes=[(1, 64)], dtype=torch.float16)
    assert clean.logits([[5, 6]]).shape == (1, 3)
    assert clean.report()["rules"]["findings"]  # a warning, which does not raise


def test_each_run_s_inputs_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    model_ = model("gpt2")
    made = {
        rules: Executor(model_, backend="checked", shapes=[(2, 64)], dtype=torch.float16,
                        rules=rules).warmup()
        for rules in ("raise", "record")
    }  # fmt: skip
    before = {rules: found(executor) for rules, executor in made.items()}
    good = made["raise"].logits(rows((5, 64)))
    with monkeypatch.context() as patch:
        patch.setattr("headswap.spyre.masks.hidden_score", lambda dtype: float("-inf"))
        with pytest.raises(RuleError, match="inputs of a run break rules of spyre") as error:
            made["raise"].logits(rows((5, 64)))
        assert [f.rule for f in error.value.report.errors] == ["R11"]
        made["record"].logits(rows((5, 64)))
        made["record"].logits(rows((5, 64)))
    assert found(made["record"]) == {**before["record"], "R11": "error"}
    again = made["raise"].logits(rows((5, 64)))
    torch.testing.assert_close(again, good, atol=0, rtol=0)


def test_heads_of_128_rotate_whole_sticks() -> None:
    wide = converted("llama", hidden_size=256, num_attention_heads=2, intermediate_size=128,
                     num_key_value_heads=1, head_dim=128)  # fmt: skip
    executor = Executor(wide, backend="checked", shapes=[(1, 64)], dtype=torch.float16).warmup()
    assert "R9" not in found(executor)


@pytest.mark.parametrize("kind", FAMILIES)
def test_weights_padded_to_sticks_give_the_models_own_numbers(kind: str) -> None:
    more = {} if kind == "opt" else {"intermediate_size": 72}
    model_, ids = converted(kind, **more), rows((5, 61, 90))
    executor = Executor(model_, backend="checked", rules="record", shapes=[(2, 64), (1, 128)])
    torch.testing.assert_close(executor.logits(ids), expected(model_, ids), atol=1e-5, rtol=0)
    passes = executor.report()["passes"]
    plain = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "granite")
    assert passes.get("heads") == ("8 to 128" if kind in plain else passes.get("heads"))
    if kind in plain:
        assert passes["intermediate"] == "72 to 128 in 2 layers"
        assert not {"R4", "R9"} & set(found(executor))
    kept = Executor(model_, backend="checked", rules="record", shapes=[(1, 64)], pad_weights=False)
    assert "heads" not in kept.report()["passes"]
    assert next(model_.parameters()).shape == next(kept.model.parameters()).shape


@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_a_norm_over_a_padded_head_stays_the_same_with_any_eps(kind: str, eps: float) -> None:
    model_, ids = converted(kind, rms_norm_eps=eps), rows((5, 61))
    executor = Executor(model_, backend="checked", rules="record", shapes=[(2, 64)])
    assert executor.report()["passes"]["heads"] == "8 to 128"
    torch.testing.assert_close(executor.logits(ids), expected(model_, ids), atol=1e-5, rtol=0)
    again = Executor(model_, backend="eager").logits(ids)  # the model's own norms are as they were
    torch.testing.assert_close(again, expected(model_, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_padded_heads_have_padded_pages(kind: str) -> None:
    model_, prompts = causal(kind), rows((20, 3))
    executor = Executor(model_, backend="checked", rules="record", block_size=64, num_blocks=9,
                        shapes=[(2, 192)]).warmup()  # fmt: skip
    assert executor.report()["passes"]["heads"] == "8 to 128"
    assert executor.generate(prompts, 6) == greedy(model_, prompts, 6)
