"""MicroBatchTrainer, and a loss of Sentence Transformers, on two ranks: what one process does with all ranks' rows."""

import contextlib
import os
import tempfile

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gradaccum import WindowError
from gradaccum.integrations.transformers import MicroBatchTrainer
from tests.integrations.distributed.problems import of_two
from tests.integrations.distributed.test_accelerate_distributed import use_fsdp
from tests.integrations.transformers.problems import logs, model, rows, train, updates
from tests.reference import FLOAT64, relative_error
from tests.torch.distributed.problems import slowly
from tests.torch.distributed.processes import on_ranks

TEXTS = "BERT, a label for each text"
TOLERANCE = {TEXTS: FLOAT64, "Llama": 2e-6, "T5": 2e-6}


@contextlib.contextmanager
def one_of_two(rank):
    of_two(rank)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]


class Sharded(MicroBatchTrainer):
    """As a Trainer with `fsdp` is on GPUs: on CPUs Accelerate takes DistributedDataParallel instead."""

    version = 2

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        use_fsdp(self.version)
        self.is_fsdp_enabled = True


class ShardedByFSDP1(Sharded):
    version = 1


def trained(rank, kind, micro, cls=MicroBatchTrainer, **more):
    """A trainer that is done, on two ranks, and its model before."""
    with one_of_two(rank), tempfile.TemporaryDirectory() as folder:
        start = model(kind).double()
        run = train(cls, start, rows(kind, 40), folder, micro=micro, ddp_backend="gloo", **more)
        assert run.args.world_size == 2
        assert run.accelerator.num_processes == 2
        return run, start


def check(kind, moved, run, **more):
    """These are the updates and the logs of one process, which has the rows of both ranks in its batches."""
    start = model(kind).double()
    with tempfile.TemporaryDirectory() as folder:
        one = train(transformers.Trainer, start, rows(kind, 40), folder, per_device_train_batch_size=20, **more)
    assert relative_error(moved, updates(one, start)) <= TOLERANCE[kind]
    check_logs(run, one, 1e-6, "loss", "grad_norm")


def check_logs(run, one, bound, *names):
    found, expected = logs(run, *names), logs(one, *names)
    assert len(expected) == 2
    assert bool(found) == run.is_world_process_zero()
    assert not found or relative_error([torch.tensor(found)], [torch.tensor(expected)]) <= bound


def named(micro):
    return micro if isinstance(micro, str) else " ".join(map(str, micro.items()))


@pytest.mark.parametrize(
    ("kind", "micro"),
    slowly(
        [(TEXTS, {"micro_batch_size": 4}), (TEXTS, {"max_tokens": 36})],
        [("Llama", {"micro_batch_size": 3}), (TEXTS, {"micro_batch_size": "auto"}), ("T5", {"max_tokens": 36})],
    ),
    ids=named,
)
@on_ranks()
def test_two_ranks_make_the_update_of_all_their_rows(rank, kind, micro):
    run, start = trained(rank, kind, micro)
    check(kind, updates(run, start), run)


PREDICTED = {"micro_batch_size": "auto", "memory_limit": "1MiB"}  # of which the process has in use more already


@pytest.mark.parametrize(
    ("kind", "micro"),
    slowly(
        [(TEXTS, {"micro_batch_size": 4}), ("Llama", {"max_tokens": 36})],
        [(TEXTS, PREDICTED), ("Llama", PREDICTED), ("Llama", {"micro_batch_size": 4})],
    ),
    ids=named,
)
@on_ranks()
def test_under_fsdp2_two_ranks_make_the_clipped_update_of_all_their_rows(rank, kind, micro):
    more = {"max_grad_norm": 0.05, "optim": "sgd", "learning_rate": 0.1}
    run, start = trained(rank, kind, micro, Sharded, **more)
    whole = {name: parameter.detach().full_tensor() for name, parameter in run.model.named_parameters()}
    assert all(isinstance(parameter, DTensor) for parameter in run.model.parameters())
    moved = [whole[name] - p.detach() for name, p in start.named_parameters() if not name.endswith("key.bias")]
    check(kind, moved, run, **more)
    size = 1 if micro == PREDICTED else micro.get("micro_batch_size")
    assert run._gradaccum_large_batch.step.micro_batch_size == size


MEANS = {"average_tokens_across_devices": False}
INEXACT = [
    ("Llama", MicroBatchTrainer, MEANS, "average_tokens_across_devices=False asks for the mean of the ranks' means"),
    (TEXTS, ShardedByFSDP1, {"optim": "sgd"}, "FSDP1 reduces in every backward pass"),
]


@pytest.mark.parametrize(("kind", "cls", "more", "message"), INEXACT, ids=["means of ranks' means", "FSDP1"])
@on_ranks()
def test_what_cannot_be_exact_is_refused_by_name(rank, kind, cls, more, message):
    with pytest.raises((ValueError, WindowError), match=message):
        trained(rank, kind, {"micro_batch_size": 4}, cls, **more)


def fine_tuned(rank, kind, micro):
    """The trainer, and the updates, of TRL's trainers on two ranks, or of one process with all their rows."""
    from tests.integrations.transformers import test_trl as trl

    classes, config, columns = {
        "SFT": ((trl.trl.SFTTrainer, trl.SFT), trl.trl.SFTConfig, ("prompt", "completion")),
        "DPO": ((trl.trl.DPOTrainer, trl.DPO), trl.trl.DPOConfig, ("prompt", "chosen", "rejected")),
    }[kind]
    reference = {"ref_model": trl.llama()} if kind == "DPO" else {}
    trl.datasets.disable_progress_bars()
    data = trl.datasets.concatenate_datasets([trl.texts(*columns)] * 3).select(range(32))
    more = {"batch": 16} if rank is None else {"ddp_backend": "gloo"}
    with contextlib.nullcontext() if rank is None else one_of_two(rank), tempfile.TemporaryDirectory() as folder:
        return trl.train(classes[rank is not None], config, trl.llama(), data, folder, micro, dict(reference), **more)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
@on_ranks()
def test_trls_trainers_on_two_ranks_make_the_update_of_all_their_rows(rank, kind):
    (run, moved), (one, expected) = fine_tuned(rank, kind, {"micro_batch_size": 3}), fine_tuned(None, kind, None)
    assert relative_error(moved, expected) <= 2e-6
    check_logs(run, one, 2e-6, "loss")


@pytest.mark.slow
@pytest.mark.parametrize("micro", [{"micro_batch_size": "auto"}, {"max_tokens": 60}], ids=str)
@on_ranks()
def test_sizes_that_ranks_choose_by_themselves_are_refused_where_a_trainer_gathers(rank, micro):
    with pytest.raises(ValueError, match="gathers metrics over the ranks, so all of them need as many micro-batches"):
        fine_tuned(rank, "SFT", micro)


WAITING = [
    ("BERT, a label for each token", "different numbers of batches: 5 batches on rank 0, 4 batches on rank 1"),
    ("SFT", "Received: 8 rows, 4 micro-batches on rank 0, 4 rows, 2 micro-batches on rank 1"),  # its loss gathers
]


@pytest.mark.parametrize(("kind", "message"), WAITING, ids=["numbers of batches", "sizes of batches"])
@on_ranks()
def test_ranks_that_would_wait_for_each_other_for_ever_are_refused_at_once(rank, kind, message):
    """With a constant learning rate nothing differed, and one rank sat in a gather, another in an exchange."""
    from tests.integrations.transformers import test_trl as trl

    class Uneven:
        def get_train_dataloader(self):
            data, collate = self.train_dataset, self.data_collator
            size, count = (8 - 4 * rank, 2) if kind == "SFT" else (4, 5 - rank)
            chosen = [data[i % len(data)] for i in range(size * count)]
            return torch.utils.data.DataLoader(chosen, batch_size=size, collate_fn=collate)

    micro = {"micro_batch_size": 2}
    with pytest.raises((ValueError, WindowError), match=message):
        if kind == "SFT":
            trl.datasets.disable_progress_bars()
            cls, data = type("Uneven", (Uneven, trl.SFT), {}), trl.texts("prompt", "completion")
            with one_of_two(rank), tempfile.TemporaryDirectory() as folder:
                trl.train(cls, trl.trl.SFTConfig, trl.llama(), data, folder, micro, ddp_backend="gloo")
        else:
            constant = {"lr_scheduler_type": "constant", "optim": "sgd", "remove_unused_columns": False}
            trained(rank, kind, micro, type("Uneven", (Uneven, MicroBatchTrainer), {}), **constant)


BOTH = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}


@pytest.mark.parametrize(
    ("options", "of_ranks"),
    slowly([({}, (9, 9)), (BOTH, (7, 4))], [({}, (7, 4)), (BOTH, (9, 9))]),
    ids=lambda value: f"{len(value)} options" if isinstance(value, dict) else str(value),
)
@on_ranks()
def test_sentence_transformers_loss_has_the_gradient_of_one_process_with_all_texts(rank, options, of_ranks):
    """As the mean over ranks that DistributedDataParallel takes."""
    pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    from gradaccum.integrations.sentence_transformers import ChunkedMultipleNegativesRankingLoss
    from tests.integrations.sentence_transformers.problems import loss_and_gradients, texts, tiny

    columns = [[texts(10 * r + column, of_ranks[r]) for column in range(3)] for r in range(2)]
    names = "input_ids", "attention_mask"
    together = [{name: torch.cat([own[i][name] for own in columns]) for name in names} for i in range(3)]
    plain, chunked = tiny(), tiny()
    expected = loss_and_gradients(MultipleNegativesRankingLoss(plain, **options), plain, together)
    loss = ChunkedMultipleNegativesRankingLoss(
        chunked, mini_batch_num_tokens=24, gather_across_devices=True, tile=4, **options
    )
    loss.model = DistributedDataParallel(chunked, find_unused_parameters=True)
    assert relative_error(loss_and_gradients(loss, chunked, columns[rank]), expected) <= FLOAT64
