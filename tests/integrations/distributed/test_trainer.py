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
        pytest.param("Llama", {"micro_batch_size": 3}, marks=pytest.mark.slow),
        pytest.param("BERT, a label for each text", {"micro_batch_size": "auto"}, marks=pytest.mark.slow),
        ("BERT, a label for each text", {"max_tokens": 36}),
        pytest.param("T5", {"max_tokens": 36}, marks=pytest.mark.slow),
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


PREDICTED = {"micro_batch_size": "auto", "memory_limit": "1MiB"}  # of which the process has in use more already


@pytest.mark.parametrize(
    ("kind", "micro"),
    [
        ("BERT, a label for each text", {"micro_batch_size": 4}),
        pytest.param("BERT, a label for each text", PREDICTED, marks=pytest.mark.slow),
        pytest.param("Llama", PREDICTED, marks=pytest.mark.slow),
        ("Llama", {"max_tokens": 36}),
        pytest.param("Llama", {"micro_batch_size": 4}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value.items())),
)
def test_under_fsdp2_two_ranks_make_the_clipped_update_of_all_their_rows(ranks, kind, micro):
    more = {"max_grad_norm": 0.05, "optim": "sgd", "learning_rate": 0.1}
    expected, expected_logs = cases.at_once(kind, 40, **more)
    for found, found_logs, size in ranks.run(cases.trained_sharded, kind, 40, micro, **more):
        assert size == (1 if micro is PREDICTED else micro.get("micro_batch_size"))
        assert relative_error(found, expected) <= TOLERANCE[kind]
        if found_logs:
            assert relative_error([torch.tensor(found_logs)], [torch.tensor(expected_logs)]) <= 1e-6


def test_fsdp1_is_refused_by_name(ranks):
    kind = "BERT, a label for each text"
    for result in ranks.try_run(cases.trained_sharded, kind, 40, {"micro_batch_size": 4}, 1, limit=30, optim="sgd"):
        assert isinstance(result, Raised)
        assert "FSDP1 reduces in every backward pass" in result.message


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_trls_trainers_on_two_ranks_make_the_update_of_all_their_rows(ranks, kind):
    expected, expected_logs = cases.fine_tuned(None, kind, None)
    for found, found_logs in ranks.run(cases.fine_tuned, kind, {"micro_batch_size": 3}, limit=120):
        assert relative_error(found, expected) <= 2e-6
        if found_logs:
            assert relative_error([torch.tensor(found_logs)], [torch.tensor(expected_logs)]) <= 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("micro", [{"micro_batch_size": "auto"}, {"max_tokens": 60}], ids=str)
def test_sizes_that_ranks_choose_by_themselves_are_refused_where_a_trainer_gathers(ranks, micro):
    for result in ranks.try_run(cases.fine_tuned, "SFT", micro, limit=120):
        assert isinstance(result, Raised)
        assert "gathers metrics over the ranks, so all of them need as many micro-batches" in result.message


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")
@pytest.mark.parametrize(
    ("kind", "batches", "message"),
    [
        (
            "BERT, a label for each token",
            True,
            "different numbers of batches: 5 batches on rank 0, 4 batches on rank 1",
        ),
        ("SFT", False, "Received: 8 rows, 4 micro-batches on rank 0, 4 rows, 2 micro-batches on rank 1"),
    ],
)
def test_ranks_that_would_wait_for_each_other_for_ever_are_refused_at_once(ranks, kind, batches, message):
    """With a constant learning rate nothing differed, and one rank sat in a gather, another in an exchange."""
    for result in ranks.try_run(cases.uneven, kind, batches, limit=60):
        assert isinstance(result, Raised)
        assert message in result.message
