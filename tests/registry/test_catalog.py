# SPDX-License-Identifier: Apache-2.0
"""Removed and renamed names: what is said of each, and that it is true of this transformers."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from headswap.registry import (
    RemovedArchitectureError,
    RenamedArchitectureError,
    TaskError,
    global_registry,
    load_tables,
)
from headswap.registry.catalog import ALIASES, RETIRED

REMOVED = sorted(name for name, gone in RETIRED.items() if gone.removed_in)
RENAMED = sorted(name for name, gone in RETIRED.items() if gone.renamed_to)
MAJOR = int(version("transformers").partition(".")[0])


@pytest.mark.skipif(MAJOR < 5, reason="transformers 4 still has them")
@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_name_says_how_to_get_it_back(name: str) -> None:
    with pytest.raises(RemovedArchitectureError, match=r"transformers 5\.0.*pip install") as caught:
        global_registry.resolve(name)
    assert caught.value.architecture == name
    assert caught.value.install_hint == "pip install 'transformers>=4.57,<5'"


@pytest.mark.skipif(MAJOR >= 5, reason="transformers 5 removed them")
@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_name_is_served_where_transformers_has_it(name: str) -> None:
    if name.endswith("ForMaskedLM"):
        with pytest.raises(TaskError, match="pass task="):
            global_registry.resolve(name)
    else:
        assert global_registry.resolve(name).entry.architecture == name


@pytest.mark.parametrize("name", RENAMED)
def test_a_renamed_name_says_the_new_one_which_exists(name: str) -> None:
    with pytest.raises(RenamedArchitectureError) as caught:
        global_registry.resolve(name)
    assert caught.value.renamed_to == RETIRED[name].renamed_to
    assert load_tables().entry(caught.value.renamed_to) is not None


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_an_alias_aims_at_a_name_of_transformers(name: str) -> None:
    assert load_tables().entry(ALIASES[name]) is not None
