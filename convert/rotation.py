# SPDX-License-Identifier: Apache-2.0
"""A rotation's settings across releases of transformers.

5.x keeps them in `rope_parameters` and reads the older fields too; 4.57 has only those
(`rope_theta`, `rope_scaling`, ...), and passes over `rope_parameters` in silence, with its defaults
in their place. So they are translated when a checkpoint is read there, and written beside when one
is made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from headswap.registry.errors import CheckpointError

_OLDER = int(transformers.__version__.partition(".")[0]) < 5
_WHOLE, _LOCAL = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class _Names:
    """The older fields: the base, that of the sliding layers ("": the same), and the share of a
    head that is rotated."""

    theta: str = "rope_theta"
    local: str = "rope_local_base_freq"
    share: str = "partial_rotary_factor"


_NEOX = _Names("rotary_emb_base", share="rotary_pct")
_MODERNBERT = _Names("global_rope_theta", "local_rope_theta")
_NAMES = {
    "gpt_neox": _NEOX,
    "gpt_neox_japanese": _NEOX,
    "modernbert": _MODERNBERT,
    "modernbert-decoder": _MODERNBERT,
    "olmo3": _Names(local=""),
}


def older_fields(rope: Mapping[str, Any], model_type: str) -> dict[str, Any] | None:
    """The fields of 4.57 that say what `rope_parameters` say; None where it has none for that."""
    names = _NAMES.get(model_type, _Names())
    if not any(isinstance(part, Mapping) for part in rope.values()):
        return _fields(rope, names, model_type)
    if set(rope) != {_WHOLE, _LOCAL}:
        return None
    whole, local = dict(rope[_WHOLE] or {}), dict(rope[_LOCAL] or {})
    theta = local.pop("rope_theta", None)
    if local.pop("rope_type", "default") != "default" or local:
        return None
    if not names.local:
        return None if theta != whole.get("rope_theta") else _fields(whole, names, model_type)
    return {**_fields(whole, names, model_type), names.local: theta}


def _fields(rope: Mapping[str, Any], names: _Names, model_type: str) -> dict[str, Any]:
    rest = {name: value for name, value in rope.items() if value is not None}
    found = {names.theta: rest.pop("rope_theta", None),
             names.share: rest.pop("partial_rotary_factor", None)}  # fmt: skip
    kind = rest.get("rope_type", "default")
    if model_type.startswith("phi3") and kind != "default":  # it allows these three alone
        rest = {"type": kind, **{n: rest.get(n) for n in ("short_factor", "long_factor")}}
    scaling = None if kind == "default" and not set(rest) - {"rope_type"} else rest
    return {**{name: value for name, value in found.items() if value is not None},
            "rope_scaling": scaling}  # fmt: skip


def is_foreign(raw: Mapping[str, Any]) -> bool:
    """Whether the config.json `raw` may say a rotation that the installed release passes over."""
    parts = (part for part in raw.values() if isinstance(part, Mapping))
    return _OLDER and ("rope_parameters" in raw or any(map(is_foreign, parts)))


def read_rotation(config: Any, raw: Mapping[str, Any], where: str) -> Any:
    """`config`, read from the config.json `raw`, or one that says what its `rope_parameters` say.

    Raises `CheckpointError` where the installed release can't say it.
    """
    if not is_foreign(raw):
        return config
    found = type(config).from_dict(with_older_fields(raw))
    found._name_or_path = config._name_or_path
    for part, own in _parts(found, raw):
        rope = own.get("rope_parameters")
        if not isinstance(rope, Mapping) or own.get("rope_scaling"):
            continue  # 5.x too prefers `rope_scaling`, and takes the base from beside it
        fields = older_fields(rope, part.model_type)
        # A share of 1 is the rule, for which a class without shares needs no field.
        if fields is None or any(getattr(part, n, 1.0) != value for n, value in fields.items()
                                 if value is not None and n != "rope_scaling"):  # fmt: skip
            raise CheckpointError(
                f"{where}: config.json keeps the rotation in rope_parameters, as transformers 5 "
                f"writes it ({dict(rope)}), and {type(part).__name__} of the installed "
                f"{transformers.__version__} has no field for it. Use transformers 5.",
                path=where,
            )
    return found


def _parts(config: Any, raw: Mapping[str, Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """`config` and the configs inside, each with its part of the file."""
    yield config, raw
    for name, inner in raw.items():
        part = getattr(config, name, None)
        if isinstance(inner, Mapping) and hasattr(part, "model_type"):
            yield from _parts(part, inner)


def write_rotation(folder: Path) -> None:
    """Put the older fields beside `rope_parameters` in the config.json of `folder`."""
    file = folder / "config.json"
    raw = with_older_fields(json.loads(file.read_text(encoding="utf-8")))
    file.write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def with_older_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json `raw` with the older fields beside each of its `rope_parameters`."""
    found = {name: with_older_fields(inner) if isinstance(inner, Mapping) else inner
             for name, inner in raw.items()}  # fmt: skip
    rope = raw.get("rope_parameters")
    if not isinstance(rope, Mapping) or raw.get("rope_scaling"):
        return found
    fields = older_fields(rope, str(raw.get("model_type"))) or {}
    return {**found, **{name: value for name, value in fields.items() if value is not None}}
