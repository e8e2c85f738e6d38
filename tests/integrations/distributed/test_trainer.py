"""MicroBatchTrainer on two ranks: the update and the logs of all ranks' rows at once."""

import pytest
import torch

from tests.integrations.distributed import trainer_cases as cases
from tests.reference import FLOAT64, relative_error
from tests.torch.distributed.processes import Raised

TOLERANCE = {"BERT, a label for each text": FLOAT64, "Llama": 2e-6, "T5": 2e-6}


@pytest.mark.parametrize(
    ("kind", "micro"),
    [
        ("BERT, a label for each text", {"micro_batch_size": 4}),
        ("Llama", {"micro_batch_size": 3}),
        ("T5", {"max_tokens": 36}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_two_ranks_make_the_update_of_all_their_rows(ranks, kind, micro):
    expected, expected_logs = cases.at_once(kind, 40)
    for found, found_logs in ranks.run(cases.trained, kind, 40, micro):
        assert relative_error(found, expected) <= TOLERANCE[kind]
        assert len(expected_logs) == 2
        if found_logs:  # on the first rank
            assert relative_error([torch.tensor(found_logs)], [torch.tensor(expected_logs)]) <= 1e-6


def test_means_of_ranks_means_are_refused_by_name(ranks):
    results = ranks.try_run(
        cases.trained, "Llama", 40, {"micro_batch_size": 4}, average_tokens_across_devices=False, limit=30
    )
    for result in results:
        assert isinstance(result, Raised)
        assert "average_tokens_across_devices=False asks for the mean of the ranks' means" in result.message
