# SPDX-License-Identifier: Apache-2.0
"""The names that others rely on: adding one is a line here, losing one needs a deprecation."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
from pathlib import Path
from typing import Any

import pytest

import headswap

ROOT = Path(__file__).resolve().parent.parent

FUNCTIONS = {
    "as_embedding_model",
    "as_reward_model",
    "as_seq_cls_model",
    "as_token_cls_model",
    "convert_checkpoint",
    "fit_head",
    "load",
    "plan",
    "register",
    "register_alias",
    "register_head_family",
    "register_suffix_rule",
    "register_weight_rule",
    "resolve",
}
CLASSES = {
    "AdapterEntry",
    "AdapterRegistry",
    "ConversionPlan",
    "ConversionReport",
    "HeadFamily",
    "HeadSpec",
    "Resolution",
    "SequenceClassificationModel",
}
ERRORS = {
    "AdapterImportError",
    "ArchitectureError",
    "CheckpointError",
    "ConversionError",
    "DuplicateArchitectureError",
    "HeadswapError",
    "InputError",
    "LabelError",
    "MissingHeadError",
    "RegistrationError",
    "RemoteCodeError",
    "RemovedArchitectureError",
    "RenamedArchitectureError",
    "TaskError",
    "UnknownArchitectureError",
    "UnsupportedHeadError",
    "WeightError",
}

CHECKPOINT = (
    "task",
    "label_tokens",
    "method",
    "num_labels",
    "head",
    "pooling",
    "allow_untrained_head",
    "trust_remote_code",
    "adapter",
)
# For each call: how many positional arguments it takes, and keywords that it must accept.
CALLS: dict[str, tuple[int, tuple[str, ...]]] = {
    "headswap:as_seq_cls_model": (
        1,
        (
            "num_labels",
            "id2label",
            "problem_type",
            "head",
            "pooling",
            "label_tokens",
            "method",
            "tokenizer",
        ),
    ),
    "headswap:as_reward_model": (1, ("head", "pooling", "label_tokens", "method", "tokenizer")),
    "headswap:as_embedding_model": (1, ("pooling",)),
    "headswap:as_token_cls_model": (1, ("num_labels", "id2label", "head")),
    "headswap:load": (1, (*CHECKPOINT, "dtype", "device")),
    "headswap:plan": (1, CHECKPOINT),
    "headswap:convert_checkpoint": (2, CHECKPOINT),
    "headswap:fit_head": (4, ("held_out", "penalties", "fold_temperature", "seed", "template")),
    "headswap:resolve": (1, ("task",)),
    "headswap:register": (1, ("target", "replace")),
    "headswap.convert:SequenceClassificationModel.forward": (
        1,
        (
            "input_ids",
            "attention_mask",
            "token_type_ids",
            "position_ids",
            "inputs_embeds",
            "labels",
        ),
    ),
    "headswap.text:Classifier.classify": (2, ("activation",)),
}


def stub() -> ast.Module:
    return ast.parse((ROOT / "facade" / "__init__.pyi").read_text("utf-8"))


def stub_names() -> set[str]:
    """What the stub binds, by import or by assignment."""
    names = set()
    for node in stub().body:
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def stub_all() -> list[str]:
    for node in stub().body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            value: list[str] = ast.literal_eval(node.value)
            return value
    raise AssertionError("the stub has no __all__")


def called(path: str) -> Any:
    module, _, attributes = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in attributes.split("."):
        found = getattr(found, name)
    return found


def test_the_public_names_are_these() -> None:
    assert set(headswap.__all__) == FUNCTIONS | CLASSES | ERRORS


def test_the_list_is_sorted() -> None:
    assert headswap.__all__ == sorted(headswap.__all__)


def test_the_stub_lists_the_same_names_and_binds_them() -> None:
    assert sorted(stub_all()) == headswap.__all__
    assert stub_names() - {"__all__", "global_registry"} == {*headswap.__all__, "__version__"}


@pytest.mark.parametrize("name", sorted(FUNCTIONS | CLASSES | ERRORS))
def test_a_name_can_be_imported_and_says_what_it_is_for(name: str) -> None:
    value = getattr(headswap, name)
    assert callable(value)
    assert inspect.getdoc(value)
    assert name in dir(headswap)


def test_every_error_of_the_registry_is_public() -> None:
    errors = importlib.import_module("headswap.registry.errors")
    root = errors.HeadswapError
    defined = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, root)}
    assert defined == ERRORS


def test_registration_goes_to_the_one_global_registry() -> None:
    registry = importlib.import_module("headswap.registry").global_registry
    for name in sorted(n for n in FUNCTIONS if n.startswith("register")):
        assert getattr(headswap, name).__self__ is registry


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'headswap' has no attribute 'as_seq_cls'"):
        _ = headswap.as_seq_cls  # type: ignore[attr-defined]


def test_the_version_is_the_installed_ones() -> None:
    assert headswap.__version__ == importlib.metadata.version("headswap")


@pytest.mark.parametrize("path", sorted(CALLS))
def test_a_call_keeps_its_keywords(path: str) -> None:
    positional, keywords = CALLS[path]
    inspect.signature(called(path)).bind(*range(positional), **dict.fromkeys(keywords))


@pytest.mark.parametrize("path", sorted(CALLS))
def test_optional_keywords_are_optional(path: str) -> None:
    inspect.signature(called(path)).bind(*range(CALLS[path][0]))
