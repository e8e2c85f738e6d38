"""Mixtures of experts: their balancing loss in micro-batches is the large batch's, against the stock Trainer."""

import sys

import pytest
import torch
import transformers

from gradaccum.integrations.transformers import MicroBatchTrainer
from gradaccum.integrations.transformers.router import FUNCTION, router_of
from tests.integrations.transformers import problems
from tests.integrations.transformers.problems import both, error, logs, rows, train
from tests.reference import relative_error

IN_FLOAT32 = 2e-6
"""The router's softmax and its sums are in float32, whatever the parameters are."""


def mixtral(**more):
    torch.manual_seed(0)
    return problems.mixtral(output_router_logits=True, router_aux_loss_coef=0.5, **more).double()


def qwen():
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=problems.VOCABULARY, **problems.SIZES, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=8, head_dim=8, output_router_logits=True, router_aux_loss_coef=0.5,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("eager")
    return model.double()


@pytest.mark.parametrize("made", [mixtral, qwen])
@pytest.mark.parametrize("micro", [problems.MICRO, {"max_tokens": 36}], ids=str)
def test_a_routers_balancing_loss_is_the_large_batchs(made, micro, tmp_path):
    start = made()
    runs = both(start, tmp_path, rows("Mixtral"), micro=micro)
    assert error(start, *runs) <= IN_FLOAT32
    theirs, ours = (torch.tensor(logs(run, "loss")) for run in runs)
    assert relative_error([ours], [theirs]) <= IN_FLOAT32


def test_each_micro_batch_by_itself_would_be_another_training(tmp_path, monkeypatch):
    monkeypatch.setattr("gradaccum.integrations.transformers.large_batch.balances", lambda trainer: False)
    start = mixtral()
    runs = both(start, tmp_path, rows("Mixtral"), micro={"micro_batch_size": 4, "verify": False})
    assert error(start, *runs) > 1e-3


def test_a_balancing_loss_of_another_kind_is_refused_by_name(tmp_path, monkeypatch):
    start = mixtral()
    place = sys.modules[type(start).__module__]
    theirs = getattr(place, FUNCTION)
    assert router_of(start) is not None

    def changed(gate_logits, num_experts=None, top_k=2, attention_mask=None):
        return 2 * theirs(gate_logits, num_experts, top_k, attention_mask)

    monkeypatch.setattr(place, FUNCTION, changed)
    assert router_of(start) is None
    with pytest.raises(ValueError, match="output_router_logits=True in the model's config adds the router's"):
        train(MicroBatchTrainer, start, rows("Mixtral"), tmp_path, micro=problems.MICRO)
    assert getattr(place, FUNCTION) is changed, "the model's own function is put back"


def test_a_loss_of_ones_own_without_the_models_has_no_balancing_loss(tmp_path):
    def own(outputs, labels, num_items_in_batch=None):
        shifted = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(*shifted, ignore_index=-100)

    start = mixtral()
    runs = both(start, tmp_path, rows("Mixtral"), micro=problems.MICRO, trainer={"compute_loss_func": own})
    assert error(start, *runs) <= IN_FLOAT32
