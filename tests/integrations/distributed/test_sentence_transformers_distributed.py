"""ChunkedMultipleNegativesRankingLoss under DistributedDataParallel, on two ranks."""

import pytest

from tests.reference import FLOAT64

pytest.importorskip("sentence_transformers")

from tests.integrations.distributed import sentence_transformers_cases as cases

BOTH = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        pytest.param({}, (9, 9), id="one way, even"),
        pytest.param({}, (7, 4), id="one way, uneven", marks=pytest.mark.slow),
        pytest.param(BOTH, (9, 9), id="both ways, even", marks=pytest.mark.slow),
        pytest.param(BOTH, (7, 4), id="both ways, uneven"),
    ],
)
def test_the_mean_over_ranks_is_the_gradient_of_one_process_with_all_texts(options, rows, ranks):
    assert max(ranks.run(cases.all_ranks_texts, rows, options)) <= FLOAT64
