"""What each rank does in test_sentence_transformers_distributed.py."""

import torch
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch.nn.parallel import DistributedDataParallel

from gradaccum.integrations.sentence_transformers import ChunkedMultipleNegativesRankingLoss
from tests.integrations.sentence_transformers.problems import loss_and_gradients, texts, tiny
from tests.reference import relative_error


def all_ranks_texts(rank, rows, options):
    """The error of the loss and of DDP's gradient against one process with the texts of all ranks."""
    of_ranks = [[texts(10 * r + column, rows[r]) for column in range(3)] for r in range(2)]
    together = [
        {name: torch.cat([columns[i][name] for columns in of_ranks]) for name in ("input_ids", "attention_mask")}
        for i in range(3)
    ]
    whole, model = tiny(), tiny()
    expected = loss_and_gradients(MultipleNegativesRankingLoss(whole, **options), whole, together)
    loss = ChunkedMultipleNegativesRankingLoss(
        model, mini_batch_num_tokens=24, gather_across_devices=True, tile=4, **options
    )
    loss.model = DistributedDataParallel(model, find_unused_parameters=True)
    return relative_error(loss_and_gradients(loss, model, of_ranks[rank]), expected)
