"""The large batch's updates, whatever a model's loss is a mean over, against the stock Trainer at the full batch."""

import functools

import pytest
import torch
import transformers

from gradaccum.integrations.transformers import MicroBatchTrainer
from tests.integrations.transformers.problems import MODELS, logs, model, rows, train, updates
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
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind == "GPT-2" else kind for kind in MODELS]
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
