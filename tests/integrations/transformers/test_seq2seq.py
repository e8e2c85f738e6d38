"""Seq2SeqTrainer: the large batch's updates, and texts that are generated in between as the stock Trainer does."""

import pytest
import torch
import transformers

from gradaccum.integrations.transformers import MicroBatchTrainer
from tests.integrations.transformers.problems import collate, logs, model, rows, train, updates
from tests.reference import relative_error


class Seq2Seq(MicroBatchTrainer, transformers.Seq2SeqTrainer):
    pass


def with_decoder_inputs(examples):
    """As DataCollatorForSeq2Seq(model=...) makes them, without which there is no label smoothing."""
    batch = collate(examples)
    ids = batch["labels"].new_zeros(batch["labels"].shape)
    ids[:, 1:] = batch["labels"][:, :-1].clamp(min=0)
    return batch | {"decoder_input_ids": ids}


@pytest.mark.parametrize(
    ("micro", "smoothing"),
    [
        ({"micro_batch_size": 4}, 0.1),
        pytest.param({"micro_batch_size": 4}, 0.0, marks=pytest.mark.slow),
        pytest.param({"max_tokens": 36}, 0.0, marks=pytest.mark.slow),
        pytest.param({"max_tokens": 36}, 0.1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_t5_makes_the_large_batchs_updates_and_generates_the_same(micro, smoothing, tmp_path):
    start, found, generated = model("T5").double(), [], []

    def keep(prediction):
        generated.append(torch.tensor(prediction.predictions))
        return {"first": float(prediction.predictions[0, -1])}

    more = {
        "kind": transformers.Seq2SeqTrainingArguments, "predict_with_generate": True, "generation_max_length": 6,
        "eval_strategy": "epoch", "label_smoothing_factor": smoothing,
        "trainer": {
            "eval_dataset": rows("T5", 8, seed=2), "compute_metrics": keep, "data_collator": with_decoder_inputs,
        },
    }  # fmt: skip
    for cls, how in ((transformers.Seq2SeqTrainer, None), (Seq2Seq, micro)):
        run = train(cls, start, rows("T5"), tmp_path, micro=how, **more)
        found.append((updates(run, start), torch.tensor(logs(run, "loss", "grad_norm")), logs(run, "eval_loss")))
    stock, ours = found
    assert relative_error(ours[0], stock[0]) <= 2e-6
    assert relative_error([ours[1]], [stock[1]]) <= 1e-6
    assert relative_error([torch.tensor(ours[2])], [torch.tensor(stock[2])]) <= 1e-6
    assert torch.equal(generated[0], generated[1])
    assert len(generated[0]) == 8
