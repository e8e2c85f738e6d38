"""Two large language models on the meta device, which allocates nothing, for `gradaccum size`.

gradaccum size examples/torch/large_models.py:seven_billion --memory 80GiB
gradaccum size examples/torch/large_models.py:seventy_billion --memory 80GiB
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROWS, LENGTH = 64, 1024


def large_model(layers: int = 2, **shape: int) -> Any:
    """A model of this shape in bfloat16, a large batch for it, and its loss."""
    with torch.device("meta"):
        config = LlamaConfig(num_hidden_layers=layers, use_cache=False, vocab_size=32000, **shape)
        model = LlamaForCausalLM(config).bfloat16()
        ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    return model, ids, {"compute_loss": lambda model, ids: model(input_ids=ids, labels=ids).loss}


def seven_billion() -> Any:
    return large_model(32, hidden_size=4096, intermediate_size=11008, num_attention_heads=32)


def seventy_billion() -> Any:
    return large_model(80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8)
