# SPDX-License-Identifier: Apache-2.0
"""A head of two layers on the last real token: the formula is the order of the layers."""

from headswap.heads import Activation, Dense, HeadFamily

TOY_MLP = HeadFamily(
    "toy-mlp",
    "last",
    (Dense("toy_head.inner"), Activation("gelu"), Dense("toy_head.outer", "labels")),
)
