"""ChunkedMultipleNegativesRankingLoss under DistributedDataParallel, on two ranks."""

import pytest

from tests.reference import FLOAT64

pytest.importorskip("sentence_transformers")

from tests.integrations.distributed import sentence_transformers_cases as cases

BOTH = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}


@pytest.mark.parametrize("rows", [(9, 9), (7, 4)], ids=["even", "uneven"])
@pytest.mark.parametrize("options", [{}, BOTH], ids=["one way", "both ways"])
def test_the_mean_over_ranks_is_the_gradient_of_one_process_with_all_texts(options, rows, ranks):
    assert max(ranks.run(cases.all_ranks_texts, rows, options)) <= FLOAT64
