"""What one rank does with a Trainer."""

import os
import tempfile

import torch
import transformers
from accelerate.state import AcceleratorState

from gradaccum.integrations.transformers import MicroBatchTrainer
from tests.integrations.transformers.problems import logs, model, rows, train, updates


def trained(rank, kind, number, micro, **more):
    """The updates and the logs of two ranks."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    try:
        start = model(kind).double()
        with tempfile.TemporaryDirectory() as folder:
            found = train(MicroBatchTrainer, start, rows(kind, number), folder, micro=micro, ddp_backend="gloo", **more)
        assert found.args.world_size == 2
        assert found.accelerator.num_processes == 2
        return [update.clone() for update in updates(found, start)], logs(found, "loss", "grad_norm")
    finally:
        AcceleratorState._reset_state(reset_partial_state=False)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]


def at_once(kind, number):
    """The same of one process, which has the rows of both ranks in its batches."""
    start = model(kind).double()
    with tempfile.TemporaryDirectory() as folder:
        found = train(transformers.Trainer, start, rows(kind, number), folder, per_device_train_batch_size=20)
    assert torch.is_grad_enabled()
    return updates(found, start), logs(found, "loss", "grad_norm")
