# SPDX-License-Identifier: Apache-2.0
"""From text to answers."""

from headswap.text.answers import Answer
from headswap.text.classifier import Classifier
from headswap.text.fit import FittedHead, fit_head
from headswap.text.template import Template, parse_template

__all__ = ["Answer", "Classifier", "FittedHead", "Template", "fit_head", "parse_template"]
