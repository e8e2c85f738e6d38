"""The large batch's updates, whatever a model's loss is a mean over, against the stock Trainer at the full batch."""

import functools

import pytest
import torch
import transformers

from gradaccum.integrations.transformers import MicroBatchTrainer
from tests.integrations.transformers.problems import FAMILIES, collate, logs, model, rows, train, updates
from tests.reference import FLOAT64, relative_error

FLOAT64_THROUGHOUT = "BERT, a label for each text", "BERT, a number for each text"
IN_FLOAT32 = 2e-6
"""Others compute in float32 inside, whatever the parameters are: the loss of logits.float(), or T5's layer norm."""


@functools.cache
def stock(kind, folder):
    start = model(kind).double()
    trainer = train(transformers.Trainer, start, rows(kind), folder)
    return start, updates(trainer, start), logs(trainer, "loss", "grad_norm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trainer")


def assert_large_batchs(kind, folder, cls=MicroBatchTrainer, **micro):
    start, expected, expected_logs = stock(kind, folder)
    found = train(cls, start, rows(kind), folder, micro=micro)
    assert found.state.global_step == len(expected_logs) == 3  # 10, 10 and 4 rows
    tolerance = FLOAT64 if kind in FLOAT64_THROUGHOUT else IN_FLOAT32
    assert relative_error(updates(found, start), expected) <= tolerance
    # The Trainer's own sum of losses is float32.
    assert relative_error([torch.tensor(logs(found, "loss", "grad_norm"))], [torch.tensor(expected_logs)]) <= 1e-6
    return found


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind == "GPT-2" else kind for kind in FAMILIES]
)
def test_a_trainers_updates_are_the_large_batchs(kind, folder):
    assert_large_batchs(kind, folder, micro_batch_size=4)


@pytest.mark.parametrize("kind", ["BERT, a label for each token", "Llama", "T5"])
def test_rows_are_trimmed_and_packed_by_their_tokens(kind, folder):
    seen = []

    class Watching(MicroBatchTrainer):
        def compute_loss(self, model, inputs, *args, **keywords):
            if not self._gradaccum_large_batch.step.proving:
                seen.append(tuple(inputs["input_ids"].shape))
            return super().compute_loss(model, inputs, *args, **keywords)

    assert_large_batchs(kind, folder, Watching, max_tokens=36)
    assert all(rows * columns <= 36 or rows == 1 for rows, columns in seen)
    assert len({columns for _, columns in seen}) > 3


def test_auto_finds_sizes_and_stays_exact(folder):
    assert_large_batchs("BERT, a label for each text", folder, micro_batch_size="auto")


# Seq2SeqTrainer: texts that are generated in between, as the stock Trainer does.


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
    theirs, ours = found
    assert relative_error(ours[0], theirs[0]) <= IN_FLOAT32
    assert relative_error([ours[1]], [theirs[1]]) <= 1e-6
    assert relative_error([torch.tensor(ours[2])], [torch.tensor(theirs[2])]) <= 1e-6
    assert torch.equal(generated[0], generated[1])
    assert len(generated[0]) == 8
