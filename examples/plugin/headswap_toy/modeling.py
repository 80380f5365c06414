# SPDX-License-Identifier: Apache-2.0
"""A small causal language model: an embedding and a recurrent layer.

A class needs nothing of headswap's: a config, a backbone under `base_model_prefix` that returns
hidden states, and an output embedding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput


class ToyConfig(PretrainedConfig):
    """Sizes of the toy."""

    model_type = "toy"

    def __init__(self, vocab_size: int = 99, hidden_size: int = 16, **kwargs: Any) -> None:
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size


class ToyPreTrainedModel(PreTrainedModel):
    """What the toy's classes share."""

    config_class = ToyConfig
    base_model_prefix = "toy"

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.2)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class ToyModel(ToyPreTrainedModel):
    """Hidden states of each token, from the tokens up to it. Pads leave the state as it is."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mix = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> BaseModelOutput:
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        real = x.new_ones(x.shape[:2]) if attention_mask is None else attention_mask
        state, states = torch.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            new = torch.tanh(self.mix(torch.cat([x[:, step], state], dim=-1)))
            state = torch.where(real[:, step, None] != 0, new, state)
            states.append(state)
        return BaseModelOutput(last_hidden_state=torch.stack(states, dim=1))


class ToyForCausalLM(ToyPreTrainedModel, GenerationMixin):
    """The toy with an output embedding."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.toy = ToyModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        self.generation_config.use_cache = False  # the toy reads the whole text at every step

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> CausalLMOutput:
        hidden = self.toy(input_ids, attention_mask).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden))
