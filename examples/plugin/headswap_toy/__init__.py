# SPDX-License-Identifier: Apache-2.0
"""What headswap calls when it looks for plugins."""

from headswap.registry import AdapterRegistry


def register(registry: AdapterRegistry) -> None:
    """Register the architecture, the head and the suffix rule; imports nothing heavy."""
    registry.register("ToyForCausalLM", "headswap_toy.modeling:ToyForCausalLM", model_type="toy")
    registry.register_head_family("toy-mlp", "headswap_toy.heads:TOY_MLP")
    registry.register_suffix_rule(
        "ForScoring", task="classify", sources=["ForCausalLM"], owner="headswap-toy"
    )
