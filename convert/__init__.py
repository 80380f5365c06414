# SPDX-License-Identifier: Apache-2.0
"""Conversions of classes, models and checkpoints into classifiers, reward models and embedders."""

from headswap.convert.api import (
    as_embedding_model,
    as_reward_model,
    as_seq_cls_model,
    as_token_cls_model,
    load,
    plan,
    resolve,
)
from headswap.convert.conversion import Conversion
from headswap.convert.model import (
    ConvertedModel,
    EmbeddingModel,
    SequenceClassificationModel,
    TokenClassificationModel,
)
from headswap.convert.plan import ConversionPlan, ConversionReport, TensorPlan
from headswap.convert.verify import VerifyReport, verify
from headswap.convert.write import convert_checkpoint

__all__ = [
    "Conversion",
    "ConversionPlan",
    "ConversionReport",
    "ConvertedModel",
    "EmbeddingModel",
    "SequenceClassificationModel",
    "TensorPlan",
    "TokenClassificationModel",
    "VerifyReport",
    "as_embedding_model",
    "as_reward_model",
    "as_seq_cls_model",
    "as_token_cls_model",
    "convert_checkpoint",
    "load",
    "plan",
    "resolve",
    "verify",
]
