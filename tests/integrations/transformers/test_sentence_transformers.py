"""sentence-transformers' trainer becomes exact by the same base class, or refuses losses across the batch."""

import pytest
import sentence_transformers
import torch
from sentence_transformers.sentence_transformer import losses

from gradaccum import NotEquivalentError
from gradaccum.integrations.transformers import MicroBatchTrainer
from tests.integrations.sentence_transformers.problems import tiny, trained
from tests.reference import relative_error

IN_FLOAT32 = 2e-6
"""Scores among the labels are float32."""


class Sentences(MicroBatchTrainer, sentence_transformers.SentenceTransformerTrainer):
    pass


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_loss_over_pairs_is_exact_and_one_across_the_batch_is_refused(tmp_path):
    start = torch.nn.utils.parameters_to_vector(tiny().parameters()).detach()
    scored = {"output_dir": str(tmp_path), "scored": True}
    expected = trained(losses.CosineSimilarityLoss, **scored)
    found = trained(losses.CosineSimilarityLoss, Sentences, {"micro_batch_size": 3}, **scored)
    assert (expected - start).abs().max() > 1e-3
    assert relative_error([found - start], [expected - start]) <= IN_FLOAT32
    with pytest.raises(NotEquivalentError, match=r"Sentences\.compute_loss"):
        trained(losses.MultipleNegativesRankingLoss, Sentences, {"micro_batch_size": 3}, output_dir=str(tmp_path))
