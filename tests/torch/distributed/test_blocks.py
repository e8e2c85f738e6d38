"""BlockStep is for one device: a model of several ranks is refused before anything is trained."""

import pytest
import torch
from torch import nn

from gradaccum.torch import BlockStep
from tests.torch.distributed.problems import network, spread
from tests.torch.distributed.processes import on_ranks

WORDS = {
    "ddp": "doesn't take DistributedDataParallel, because it runs on one device. Use TrainStep",
    "fsdp2": "doesn't take FSDPModule, because it runs on one device. Use TrainStep",
}


@pytest.mark.parametrize("engine", WORDS)
@on_ranks()
def test_a_model_of_several_ranks_is_refused_by_name(rank, engine):
    model = spread(engine, network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=WORDS[engine]):
        BlockStep(model, optimizer, blocks=[*model.modules()][-1:], loss_fn=nn.MSELoss(), micro_batch_size=2)
