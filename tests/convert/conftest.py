# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """`saved(model_type, auto_class, **config)` -> folder of a tiny model, saved the stock way."""

    def build(model_type: str, auto: str = "AutoModelForCausalLM", **more: Any) -> Path:
        folder = tmp_path / f"{model_type}-{auto}"
        tiny(model_type, auto, **more).save_pretrained(folder)
        return folder

    return build
