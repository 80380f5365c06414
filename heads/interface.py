# SPDX-License-Identifier: Apache-2.0
"""What other parts may ask of a converted model, without knowing which class it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from headswap.heads.spec import HeadSpec


@runtime_checkable
class HeadedModel(Protocol):
    """A backbone, a head and the rule that picks the rows between them."""

    config: Any
    head_spec: HeadSpec

    @property
    def backbone(self) -> nn.Module:
        """The module that turns ids into hidden states `[batch, length, hidden]`."""

    def logits_of(self, rows: Tensor) -> Tensor:
        """Logits `[..., labels]` (fp32) of pooled rows `[..., hidden]`."""

    def rows(self, inputs: Mapping[str, Tensor | None]) -> Any:
        """What the head gets for padded `inputs`: `.values` `[batch, hidden]`, pooled by the
        mask."""
