"""What one rank does with a Trainer."""

import contextlib
import os
import tempfile

import torch
import transformers
from accelerate import DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from torch.distributed.tensor import DTensor

from gradaccum.integrations.transformers import MicroBatchTrainer
from tests.integrations.transformers.problems import logs, model, rows, train, updates


@contextlib.contextmanager
def one_of_two(rank):
    """The environment that torchrun makes."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=False)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]


def trained(rank, kind, number, micro, cls=MicroBatchTrainer, **more):
    """The updates and the logs of two ranks."""
    with one_of_two(rank):
        start = model(kind).double()
        with tempfile.TemporaryDirectory() as folder:
            found = train(cls, start, rows(kind, number), folder, micro=micro, ddp_backend="gloo", **more)
        assert found.args.world_size == 2
        assert found.accelerator.num_processes == 2
        return [update.clone() for update in updates(found, start)], logs(found, "loss", "grad_norm")


class Sharded(MicroBatchTrainer):
    """As a Trainer with `fsdp` is on GPUs: on CPUs Accelerate takes DistributedDataParallel instead."""

    version = 2

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=self.version,
            reshard_after_forward=self.version == 2 or "full_shard",
            cpu_ram_efficient_loading=False,
        )
        for state in (PartialState._shared_state, AcceleratorState._shared_state):
            state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state["fsdp_plugin"] = plugin
        self.is_fsdp_enabled = True


class ShardedByFSDP1(Sharded):
    version = 1


def trained_sharded(rank, kind, number, micro, version=2, **more):
    try:
        return _trained_sharded(rank, kind, number, micro, version, **more)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def _trained_sharded(rank, kind, number, micro, version, **more):
    with one_of_two(rank):
        start = model(kind).double()
        with tempfile.TemporaryDirectory() as folder:
            cls = Sharded if version == 2 else ShardedByFSDP1
            found = train(cls, start, rows(kind, number), folder, micro=micro, ddp_backend="gloo", **more)
        whole = {name: parameter.detach().full_tensor() for name, parameter in found.model.named_parameters()}
        assert all(isinstance(parameter, DTensor) for parameter in found.model.parameters())
        moved = [whole[name] - p.detach() for name, p in start.named_parameters() if not name.endswith("key.bias")]
        return moved, logs(found, "loss", "grad_norm"), found._gradaccum_large_batch.step.micro_batch_size


def fine_tuned(rank, kind, micro):
    """The updates of TRL's trainers on two ranks, or of one process with all their rows where `rank` is None."""
    from tests.integrations.transformers import test_trl as trl

    classes, config, columns = {
        "SFT": ((trl.trl.SFTTrainer, trl.SFT), trl.trl.SFTConfig, ("prompt", "completion")),
        "DPO": ((trl.trl.DPOTrainer, trl.DPO), trl.trl.DPOConfig, ("prompt", "chosen", "rejected")),
    }[kind]
    reference = {"ref_model": trl.llama()} if kind == "DPO" else {}
    trl.datasets.disable_progress_bars()
    data = trl.datasets.concatenate_datasets([trl.texts(*columns)] * 3).select(range(32))
    with one_of_two(rank) if rank is not None else contextlib.nullcontext(), tempfile.TemporaryDirectory() as folder:
        more = {"ddp_backend": "gloo"} if rank is not None else {"batch": 16}
        cls = classes[rank is not None]
        run, moved = trl.train(cls, config, trl.llama(), data, folder, micro, dict(reference), **more)
        return [update.clone() for update in moved], logs(run, "loss")


def uneven(rank, kind, uneven_batches=True):
    """What ranks with different numbers of batches do, or with batches of different sizes under a loss that gathers."""
    from torch.utils.data import DataLoader

    from tests.integrations.transformers import problems
    from tests.integrations.transformers import test_trl as trl

    class Uneven:
        def get_train_dataloader(self):
            data = self.train_dataset
            collate = self.data_collator
            size, count = (4, 5 - rank) if uneven_batches else (8 - 4 * rank, 2)
            return DataLoader([data[i % len(data)] for i in range(size * count)], batch_size=size, collate_fn=collate)

    with one_of_two(rank), tempfile.TemporaryDirectory() as folder:
        if kind == "SFT":
            trl.datasets.disable_progress_bars()
            cls = type("Uneven", (Uneven, trl.SFT), {})
            data, micro = trl.texts("prompt", "completion"), {"micro_batch_size": 2}
            trl.train(cls, trl.trl.SFTConfig, trl.llama(), data, folder, micro, ddp_backend="gloo")
        else:
            cls, data = type("Uneven", (Uneven, MicroBatchTrainer), {}), rows(kind, 20)
            constant = {"lr_scheduler_type": "constant", "optim": "sgd", "remove_unused_columns": False}
            micro = {"micro_batch_size": 2}
            problems.train(cls, model(kind).double(), data, folder, micro=micro, ddp_backend="gloo", **constant)


def at_once(kind, number, **more):
    """The same of one process, which has the rows of both ranks in its batches."""
    start = model(kind).double()
    with tempfile.TemporaryDirectory() as folder:
        found = train(transformers.Trainer, start, rows(kind, number), folder, per_device_train_batch_size=20, **more)
    assert torch.is_grad_enabled()
    return updates(found, start), logs(found, "loss", "grad_norm")
