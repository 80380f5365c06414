# SPDX-License-Identifier: Apache-2.0
"""A rotation is the same whichever release of transformers wrote the config and which reads it."""

from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import tiny
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

import headswap
from headswap.convert import rotation
from headswap.convert.checkpoint import open_checkpoint
from headswap.convert.rotation import older_fields, write_rotation
from headswap.convert.verify import verify
from headswap.registry.errors import CheckpointError

V5 = int(transformers.__version__.partition(".")[0]) >= 5
SEQ = "AutoModelForSequenceClassification"
NEOX = {"rotary_emb_base": 77777.0, "rotary_pct": 0.5}
MODERNBERT = {"global_rope_theta": 77777.0, "local_rope_theta": 555.0}
GEMMA3 = {"rope_theta": 77777.0, "rope_local_base_freq": 555.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 2.0}
SAID: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_theta": 77777.0}),
    ("llama", {"rope_theta": 77777.0, "rope_scaling": LLAMA3}),
    ("qwen2", {"rope_theta": 77777.0}),
    ("qwen3", {"rope_theta": 77777.0, "rope_scaling": YARN}),
    ("mistral", {"rope_theta": 77777.0}),
    ("gemma", {"rope_theta": 77777.0}),
    ("gemma2", {"rope_theta": 77777.0}),
    ("gemma3_text", GEMMA3),
    ("gemma3_text", {**GEMMA3, "rope_scaling": LINEAR}),
    ("gpt_neox", NEOX),
    ("phi", {"rope_theta": 77777.0, "partial_rotary_factor": 0.5}),
    ("mixtral", {"rope_theta": 77777.0}),
    ("modernbert", MODERNBERT),
]
"""Fields as 4.57 has them, by model type."""


def named(case: tuple[str, dict[str, Any]]) -> str:
    return case[0] + (
        "-" + case[1]["rope_scaling"]["rope_type"] if "rope_scaling" in case[1] else ""
    )


def as_newer(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """What transformers 5 makes of these fields."""
    scaling = fields.get("rope_scaling", {"rope_type": "default"})
    base = fields.get("rope_theta", fields.get("rotary_emb_base", fields.get("global_rope_theta")))
    share = fields.get("partial_rotary_factor", fields.get("rotary_pct"))
    whole = {**scaling, "rope_theta": base, **({"partial_rotary_factor": share} if share else {})}
    local = fields.get("rope_local_base_freq", fields.get("local_rope_theta"))
    if local is None:
        return whole
    return {"full_attention": whole,
            "sliding_attention": {"rope_type": "default", "rope_theta": local}}  # fmt: skip


def saved(kind: str, folder: Path, fields: dict[str, Any]) -> Any:
    """A tiny classifier that was made with `fields`, saved."""
    model = tiny(kind, SEQ, num_labels=3, **copy.deepcopy(fields))  # transformers writes into them
    model.save_pretrained(folder)
    return model


def rewritten(folder: Path, **fields: Any) -> None:
    """config.json without any of the names of a rotation, and with `fields`."""
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    names = ("rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq",
             "partial_rotary_factor", *NEOX, *MODERNBERT)  # fmt: skip
    file.write_text(json.dumps({n: v for n, v in raw.items() if n not in names} | fields))


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(10, 50).reshape(1, -1)
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=ids, attention_mask=ids != 0).logits
    return found


@pytest.mark.parametrize("case", SAID, ids=named)
@pytest.mark.parametrize("newer", [False, True])
def test_a_checkpoint_of_either_release_gives_its_own_numbers(
    case: tuple[str, dict[str, Any]], newer: bool, tmp_path: Path
) -> None:
    kind, fields = case
    model = saved(kind, tmp_path, fields)
    plain = logits(tiny(kind, SEQ, num_labels=3))
    rewritten(tmp_path, **({"rope_parameters": as_newer(kind, fields)} if newer else fields))
    wanted = logits(model)
    assert (wanted - plain).abs().max() > 1e-4  # else nothing is shown
    source = type(tiny(kind, "AutoModel" if kind == "modernbert" else "AutoModelForCausalLM"))
    for read in (
        headswap.load(tmp_path),
        headswap.as_seq_cls_model(source).from_pretrained(tmp_path),
    ):
        torch.testing.assert_close(logits(read), wanted, atol=1e-5, rtol=0)
    assert verify(tmp_path).ok


@pytest.mark.parametrize("case", SAID, ids=named)
def test_what_is_converted_is_read_alike_by_both_releases(
    case: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    kind, fields = case
    model = saved(kind, tmp_path / "from", fields)
    headswap.convert_checkpoint(tmp_path / "from", tmp_path / "to")
    raw = json.loads((tmp_path / "to" / "config.json").read_text())
    for name, value in fields.items():
        if name != "rope_scaling":
            assert raw[name] == value
        else:
            assert value.items() <= raw[name].items()
    stock = type(model).from_pretrained(tmp_path / "to")
    torch.testing.assert_close(logits(stock), logits(model), atol=1e-5, rtol=0)
    for name in ("rope_parameters", *fields):
        assert getattr(stock.config, name, None) == getattr(model.config, name, None)


def kinds() -> list[tuple[str, str]]:
    """Model types with a base that the older fields can set, with that field's name."""
    found = []
    for kind in CONFIG_MAPPING_NAMES:
        own = rotation._NAMES.get(kind, rotation._Names()).theta
        try:
            known = V5 or own in inspect.signature(CONFIG_MAPPING[kind].__init__).parameters
            config = CONFIG_MAPPING[kind](**{own: 77777.0}) if known else None
            assert config is None or type(config).from_dict(config.to_dict())
        except Exception:
            continue  # needs a package that is not here, or uses that name otherwise
        if known and (not V5 or "77777" in str(getattr(config, "rope_parameters", None))):
            found.append((kind, own))
    return found


@pytest.mark.parametrize(("kind", "theta"), sorted(kinds()))
def test_every_rotation_is_translated_into_the_fields_that_its_config_has(
    kind: str, theta: str
) -> None:
    config = CONFIG_MAPPING[kind](**{theta: 77777.0})
    if V5:  # back to what transformers itself made it from; nested ones may have no older form
        fields = older_fields(config.rope_parameters, kind)
        assert fields is None or fields[theta] == 77777.0
        return
    local = rotation._NAMES.get(kind, rotation._Names()).local
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 33333.0}
    if local and hasattr(config, local):
        rope = {"full_attention": rope,
                "sliding_attention": {"rope_type": "default", "rope_theta": 9.0}}  # fmt: skip
    raw = {**config.to_dict(), "rope_scaling": None, "rope_parameters": rope}
    config = rotation.read_rotation(config, raw, kind)
    assert getattr(config, theta) == 33333.0
    assert not local or getattr(config, local, 9.0) == 9.0


def test_what_4_57_has_no_field_for_is_refused_there(tmp_path: Path) -> None:
    saved("llama", tmp_path, {})
    odd = {"full_attention": {"rope_type": "default", "rope_theta": 9.0},
           "sliding_attention": {"rope_type": "linear", "factor": 2.0}}  # fmt: skip
    rewritten(tmp_path, rope_parameters=odd)
    assert older_fields(odd, "llama") is None
    if V5:
        return
    with pytest.raises(CheckpointError, match=r"as transformers 5 writes it .*Use transformers 5"):
        open_checkpoint(tmp_path)


def test_a_config_without_a_rotation_is_written_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "bert", "inner": {"b": 1}}))
    write_rotation(tmp_path)
    assert json.loads(file.read_text()) == {"model_type": "bert", "inner": {"b": 1}}
