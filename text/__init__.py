# SPDX-License-Identifier: Apache-2.0
"""From text to answers."""

from headswap.heads import Calibration
from headswap.text.answers import Answer, Ranked
from headswap.text.classifier import Classifier
from headswap.text.embedder import Embedder
from headswap.text.fit import FittedHead, fit_head
from headswap.text.reranker import Reranker
from headswap.text.reward import RewardModel
from headswap.text.roles import Roles, roles
from headswap.text.template import Template, parse_template

__all__ = [
    "Answer",
    "Calibration",
    "Classifier",
    "Embedder",
    "FittedHead",
    "Ranked",
    "Reranker",
    "RewardModel",
    "Roles",
    "Template",
    "fit_head",
    "parse_template",
    "roles",
]
