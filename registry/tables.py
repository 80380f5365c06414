# SPDX-License-Identifier: Apache-2.0
"""transformers' own tables of architectures, read without importing it.

Importing the module that holds them costs 5 to 9 seconds, with torch; reading its text a tenth of
one. A name can so be refused as a duplicate, or resolved, at once.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from headswap.registry.entry import AdapterEntry, Task

OWNER = "transformers"
_READING = threading.Lock()
# Our word for a table -> its name in transformers; the order decides what a name in several is.
_NAMES = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "classify": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token-classify": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "base": "MODEL_MAPPING_NAMES",
}
_TASKS: dict[str, Task | None] = {
    "causal": "generate",
    "classify": "classify",
    "token-classify": "token-classify",
    "seq2seq": "generate",
    "image-text": "generate",
    "masked": None,
    "base": "embed",
}
FOR_TASK: dict[Task, tuple[str, ...]] = {
    "generate": ("causal", "seq2seq", "image-text"),
    "classify": ("classify",),
    "reward": ("classify",),
    "token-classify": ("token-classify",),
    "embed": ("base",),
}

Table = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Tables:
    """Model type -> class names, for each of transformers' tables."""

    tables: Mapping[str, Table] = field(default_factory=dict)
    folder: str | None = None
    """Where transformers' models lie."""

    @cached_property
    def _index(self) -> Mapping[str, tuple[tuple[str, str], ...]]:
        """Class name -> the (table, model type) pairs that list it, causal ones first."""
        found: dict[str, list[tuple[str, str]]] = {}
        for table in _NAMES:
            for model_type, names in self.tables.get(table, {}).items():
                for name in names:
                    found.setdefault(name, []).append((table, model_type))
        return {name: tuple(places) for name, places in found.items()}

    def class_names(self, table: str) -> tuple[str, ...]:
        """The class names of one of the `tables`, sorted; () for a table that is not there."""
        return tuple(sorted({n for names in self.tables.get(table, {}).values() for n in names}))

    def model_types(self, architecture: str) -> tuple[str, ...]:
        """The model types that the class serves; several for some, () for an unknown name.

        A type of a text model comes before the multimodal one that contains it
        (`Qwen3_5ForCausalLM` serves `qwen3_5_text` and `qwen3_5`).
        """
        types = dict.fromkeys(m for _, m in self._index.get(architecture, ()))
        return tuple(sorted(types, key=lambda model_type: not model_type.endswith("_text")))

    def by_model_type(self, model_type: str, task: Task) -> str | None:
        """The class of `model_type` for `task`; None if there is none."""
        found = (self.tables.get(t, {}).get(model_type, ()) for t in FOR_TASK[task])
        return next((names[0] for names in found if names), None)

    def is_causal(self, model_type: str) -> bool:
        """Whether the type has a causal class and no masked one (which BERT's types have)."""
        held = self.tables.get("causal", {}), self.tables.get("masked", {})
        return model_type in held[0] and model_type not in held[1]

    def entry(self, architecture: str) -> AdapterEntry | None:
        """The entry of one of transformers' classes; None for a name it does not list."""
        places = self._index.get(architecture)
        if not places:
            return self._unlisted(architecture)
        table = places[0][0]
        kinds = [model_type for each, model_type in places if each == table]
        # Of several types (exaone's is Llama's class too) the one that the class is named after.
        model_type = max(kinds, key=lambda kind: len(kind) * _named_after(architecture, kind))
        return AdapterEntry(
            architecture,
            f"{OWNER}:{architecture}",
            task=_TASKS[table],
            model_type=model_type,
            owner=OWNER,
        )

    def _unlisted(self, architecture: str) -> AdapterEntry | None:
        """A causal class that transformers has and lists in no table (`ClvpForCausalLM`)."""
        if self.folder is None or not architecture.endswith(("ForCausalLM", "LMHeadModel")):
            return None
        module = _module_of(self.folder, architecture)
        if module is None:
            return None
        return AdapterEntry(architecture, f"{module}:{architecture}", task="generate", owner=OWNER)

    def architectures(self, task: Task | None = None) -> tuple[str, ...]:
        """All class names, or those for `task`, sorted."""
        if task is None:
            return tuple(sorted(self._index))
        wanted = FOR_TASK[task]
        return tuple(sorted(n for n, at in self._index.items() if any(t in wanted for t, _ in at)))


def load_tables() -> Tables:
    """The tables of the installed transformers; empty ones if it is not installed."""
    spec = importlib.util.find_spec(OWNER)  # finds the folder, imports nothing
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        return Tables()
    # One thread at a time: CPython 3.11 keeps the depth of its syntax trees for all threads in one
    # place and raises SystemError when two of them build trees at once.
    with _READING:
        return _read(str(Path(places[0], "models")))


@lru_cache(maxsize=4)
def _read(folder: str) -> Tables:
    try:
        file = Path(folder, "auto", "modeling_auto.py")
        found = _parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, TypeError, ValueError):  # moved, or no longer plain literals
        found = {}
    if set(found) == set(_NAMES):
        return Tables(found, folder)
    # Another layout than the ones we know: pay for the import rather than miss a name.
    module = importlib.import_module("transformers.models.auto.modeling_auto")
    tables = {ours: _plain(getattr(module, name, {})) for ours, name in _NAMES.items()}
    return Tables(tables, folder)


def _named_after(architecture: str, folder: str) -> bool:
    plain = [name.lower().replace("_", "").replace("-", "") for name in (architecture, folder)]
    return plain[0].startswith(plain[1])


@lru_cache(maxsize=256)
def _module_of(folder: str, architecture: str) -> str | None:
    """The module of transformers that defines a class; its folder's name begins the class's."""
    kinds = [place.name for place in Path(folder).iterdir()]
    for kind in sorted(each for each in kinds if _named_after(architecture, each)):
        for file in Path(folder, kind).glob("modeling_*.py"):
            if f"\nclass {architecture}(" in file.read_text(encoding="utf-8"):
                return f"{OWNER}.models.{kind}.{file.stem}"
    return None


def _parse(source: str) -> dict[str, Table]:
    ours = {name: word for word, name in _NAMES.items()}
    found: dict[str, Table] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        word = ours.get(node.targets[0].id)
        if word and isinstance(node.value, ast.Call) and len(node.value.args) == 1:
            found[word] = _plain(dict(ast.literal_eval(node.value.args[0])))
    return found


def _plain(table: Mapping[str, Any]) -> Table:
    return {
        model_type: (names,) if isinstance(names, str) else tuple(names)
        for model_type, names in table.items()
    }
