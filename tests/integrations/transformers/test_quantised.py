"""Adapters on a quantised base: their updates are the large batch's, and the base stays as it is."""

import pytest
import torch
import transformers
from torch import nn

from tests.integrations.transformers.problems import both, rows
from tests.reference import relative_error

peft = pytest.importorskip("peft")
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
IN_FLOAT32 = 1e-5


def four_bits(linear):
    bnb = pytest.importorskip("bitsandbytes")
    how = {"bias": False, "compute_dtype": torch.float32, "quant_type": "nf4"}
    made = bnb.nn.Linear4bit(linear.in_features, linear.out_features, **how)
    made.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
    return made.to("cpu")


def torchao(linear):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(linear, quantization.Int8WeightOnlyConfig())
    return linear


def adapted(quantise):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=37, **SIZES))
    for name, layer in [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear) and "proj" in name]:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, quantise(layer))
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.filterwarnings("ignore")  # theirs, while they are imported and cast
@pytest.mark.parametrize("micro", [{"micro_batch_size": 4}, {"max_tokens": 40}], ids=str)
@pytest.mark.parametrize("quantise", [four_bits, torchao])
def test_adapters_on_a_quantised_base_make_the_large_batchs_updates(quantise, micro, tmp_path):
    start = adapted(quantise)
    stock, found = both(start, tmp_path, rows("Llama"), micro=micro, max_grad_norm=0.0)

    def moved(trainer):
        pairs = zip(trainer.model.parameters(), start.parameters(), strict=True)
        return [a.detach() - b.detach() for a, b in pairs if b.requires_grad]

    assert relative_error(moved(found), moved(stock)) <= IN_FLOAT32
    if quantise is not torchao:  # packed for evaluation, they would be of another shape and precision for good
        for ours, theirs in zip(found.model.parameters(), stock.model.parameters(), strict=True):
            assert ours.shape == theirs.shape
