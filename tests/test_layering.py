# SPDX-License-Identifier: Apache-2.0
"""Which folder may import which, and how large files and functions may be."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60

# For each folder, the modules of headswap that it may import; a prefix allows what is below it.
ALLOWED = {
    "registry": {"headswap.registry"},
    "heads": {"headswap.heads", "headswap.registry"},
    "convert": {"headswap.convert", "headswap.heads", "headswap.registry"},
    "spyre": {"headswap.spyre", "headswap.heads", "headswap.registry.errors"},
    "text": {
        "headswap.text",
        "headswap.convert",
        "headswap.heads",
        "headswap.registry",
        "headswap.spyre",
    },
    "facade": {"headswap"},
}
BARE = {*ALLOWED, "integrations"}
OURS = {*BARE, "headswap"}
FOLDERS = sorted(ALLOWED)


def sources(folder: str) -> list[Path]:
    return sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in {".py", ".pyi"})


def parsed(folder: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sources(folder):
        yield path, ast.parse(path.read_text("utf-8"), str(path))


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and module of every import, lazy ones and `import_module("...")` among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module == "headswap":  # `from headswap import heads` names a folder
                yield from ((node.lineno, f"headswap.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, "." * node.level + (node.module or "")
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = node.func.id if isinstance(node.func, ast.Name) else called
            first = node.args[0]
            named = str(first.value) if isinstance(first, ast.Constant) else ""
            # Strangers loaded by name are how the registry works without importing them.
            if called in {"import_module", "__import__"} and named.partition(".")[0] in OURS:
                yield node.lineno, named


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(f"{prefix}.")


def refused(folder: str, module: str) -> str | None:
    """Why `folder` may not import `module`, or None."""
    if module.startswith("."):
        return "is relative"
    top = module.partition(".")[0]
    if top in BARE:
        return "is a second copy of a folder"
    if top == "headswap":
        return None if any(within(module, p) for p in ALLOWED[folder]) else "points upward"
    if folder == "registry" and top not in sys.stdlib_module_names:
        return "is outside the standard library"
    return None


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_what_lies_below_it(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {module} {why}"
        for path, tree in parsed(folder)
        for line, module in imports(tree)
        if (why := refused(folder, module))
    ]
    assert found == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_is_a_package_and_not_empty(folder: str) -> None:
    assert (ROOT / folder / "__init__.py").is_file()
    assert len(sources(folder)) > 1


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_and_functions_stay_short(folder: str) -> None:
    found = []
    for path, tree in parsed(folder):
        lines = len(path.read_text("utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            found.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} {length}")
    assert found == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_design_says_what_each_file_is_for(folder: str) -> None:
    rows = [line.split("|")[1] for line in (ROOT / "DESIGN.md").read_text("utf-8").splitlines()
            if line.startswith("| `")]  # fmt: skip
    named: set[str] = set()
    for row in rows:
        places = re.findall(r"`([^`]+)`", row)
        home = places[0].rpartition("/")[0]
        named |= {place if "/" in place else f"{home}/{place}" for place in places}
    files = {file.relative_to(ROOT).as_posix() for file in (ROOT / folder).rglob("*.py")}
    assert {file for file in files if not file.endswith("__init__.py")} <= named


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_file_names_its_licence_first(folder: str) -> None:
    line = "# SPDX-License-Identifier: Apache-2.0"
    wrong = [path for path, _ in parsed(folder) if path.read_text("utf-8").split("\n")[0] != line]
    assert wrong == []


@pytest.mark.parametrize(
    ("folder", "line", "reason"),
    [
        ("registry", "import torch", "outside the standard library"),
        ("registry", "def f():\n    from transformers import AutoConfig", "outside"),
        ("registry", "from headswap.heads import HeadSpec", "points upward"),
        ("heads", "from headswap import convert", "points upward"),
        ("convert", "import headswap.spyre.shapes", "points upward"),
        ("spyre", "from headswap.convert import plan", "points upward"),
        ("spyre", "from headswap.registry import global_registry", "points upward"),
        ("spyre", "import_module('headswap.text')", "points upward"),
        ("text", "import headswap", "points upward"),
        ("facade", "from heads import HeadSpec", "second copy"),
        ("heads", "from .spec import HeadSpec", "is relative"),
    ],
)
def test_the_walk_sees_a_wrong_import(folder: str, line: str, reason: str) -> None:
    ((_, module),) = imports(ast.parse(line))
    assert reason in (refused(folder, module) or "")


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("registry", "import json"),
        ("heads", "from headswap.registry.errors import HeadswapError"),
        ("spyre", "from headswap.registry.errors import HeadswapError"),
        ("convert", "from headswap.heads import HeadSpec"),
        ("text", "from headswap.spyre import Executor"),
        ("facade", "import headswap"),
    ],
)
def test_the_walk_allows_a_right_import(folder: str, line: str) -> None:
    ((_, module),) = imports(ast.parse(line))
    assert refused(folder, module) is None
