"""Lightning's Trainer on two real processes: a window's update is that of all ranks' rows."""

import os
import warnings

import pytest
import torch

from gradaccum import WindowError
from gradaccum.torch import TrainStep
from gradaccum.torch.optim import Optimizer
from tests.integrations.distributed.problems import batches, check, of_two, windows
from tests.integrations.lightning_problems import GradientAccumulation, SaveAfter, StopAt, lightning, quiet_trainer
from tests.torch.distributed.problems import error_of, slowly
from tests.torch.distributed.processes import on_ranks
from tests.torch.problems import mse, network, sgd


class Rows:
    """A loader that begins its first epoch in the middle."""

    def __init__(self, found, start=0):
        self.found, self.start = found, start

    def __len__(self):
        return len(self.found)

    def __iter__(self):
        found, self.start = self.found[self.start :], 0
        yield from found


class Module(lightning.LightningModule):
    def __init__(self, before=None):
        """`before(module, index)` is called in each training step."""
        super().__init__()
        self.network, self.before = network(dtype=torch.float64), before

    def configure_optimizers(self):
        return sgd(self.parameters())

    def training_step(self, batch, index):
        if self.before is not None:
            self.before(self, index)
        return mse(self.network, *batch)

    def validation_step(self, batch, index):
        self.log("loss", mse(self.network, *batch), sync_dist=True)


def fit(rank, steps, module=None, rows=None, callbacks=(), checkpoint=None, weight=None, ddp=None, **keywords):
    """Train on two ranks. Returns the module."""
    of_two(rank)
    os.environ["TORCHELASTIC_RUN_ID"] = "1"
    strategy = lightning.strategies.DDPStrategy(**(ddp or {}))
    several = {"devices": 2, "strategy": strategy, "use_distributed_sampler": False, "max_epochs": 2}
    return fit_with(several | keywords, rank, steps, module, rows, callbacks, checkpoint, weight)


def fit_with(keywords, rank, steps, module=None, rows=None, callbacks=(), checkpoint=None, weight=None):
    windowed = [GradientAccumulation(steps, weight=weight)] if steps else []
    module, validation = module or Module(), keywords.pop("validation", None)
    trainer = quiet_trainer(callbacks=[*callbacks, *windowed], **keywords)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = Rows(batches(rank)) if rows is None else rows
        trainer.fit(module, rows, validation, ckpt_path=checkpoint, weights_only=False)
    module.updates = trainer.global_step
    return module


DDP = "gradient_as_bucket_view", "find_unused_parameters"
OPTIONS = [(2, {}), (3, {}), (2, {"gradient_clip_val": 0.05}), *((2, {"ddp": {name: True}}) for name in DDP)]


@pytest.mark.parametrize(("steps", "options"), slowly(OPTIONS, [(1, {}), (5, {})]), ids=str)
@on_ranks()
def test_ragged_and_short_windows_make_the_update_of_all_ranks_rows_clipped_and_with_ddps_own(rank, steps, options):
    module = fit(rank, steps, **options)
    check(module, [*windows(steps)] * 2, clip_grad_norm=options.get("gradient_clip_val"))
    assert module.updates == 2 * -(-5 // steps)


@pytest.mark.parametrize(
    "silent",  # (rank, micro-batch)
    slowly([[(0, 1), (1, 2)], [(1, 4)], [(0, 0), (1, 0)]], [[(0, 0)], [(0, 4)]]),
    ids=str,
)
@on_ranks()
def test_a_batch_of_weight_zero_on_one_rank_is_left_out(rank, silent):
    """Its loss is NaN."""
    rows = [(x, y * float("nan")) if (rank, index) in silent else (x, y) for index, (x, y) in enumerate(batches(rank))]
    module = fit(
        rank, 2, rows=Rows(rows), weight=lambda batch: 0 if batch[1].isnan().any() else len(batch[0]), max_epochs=1
    )
    check(module, [*windows(2, left_out=silent)])


@on_ranks()
def test_training_that_is_stopped_inside_a_window_makes_its_update(rank):
    module = fit(rank, 3, callbacks=[StopAt(3)])
    check(module, [*windows(3, 4)])
    assert module.updates == 2


@pytest.mark.parametrize("index", [1, 2])
@on_ranks()
def test_resumed_inside_a_window_training_is_the_same(rank, tmp_path, index):
    path = str(tmp_path / "middle.ckpt")
    fit(rank, 3, callbacks=[SaveAfter(6 + index, path)])
    module = fit(rank, 3, rows=Rows(batches(rank), index + 1), checkpoint=path, max_epochs=3)
    check(module, [*windows(3)] * 3)
    assert module.updates == 6


def save(rank, index, path):
    fit(rank, 3, callbacks=[SaveAfter(6 + index, path)])


@pytest.mark.parametrize("index", [0, 1])
def test_what_two_ranks_have_saved_inside_a_window_goes_on_exactly_on_one(ranks, tmp_path, index):
    """Which has the rows of both."""
    ranks.run(save, index, path := str(tmp_path / "middle.ckpt"))
    rows = [tuple(map(torch.cat, zip(*both, strict=True))) for both in zip(batches(0), batches(1), strict=True)]
    module = fit_with({"max_epochs": 3}, 0, 3, rows=Rows(rows, index + 1), checkpoint=path)
    check(module, [*windows(3)] * 3)
    assert module.updates == 6


class ScheduledApart(Module):
    """Ranks have schedules of their own."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "rank"}}


class EndsEarly(Module):
    def on_train_batch_start(self, batch, index):
        return -1 if index == 3 else None


class Unsized(torch.utils.data.IterableDataset):
    def __init__(self, found):
        self.found = found

    def __iter__(self):
        yield from self.found


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("loader", "have different numbers of batches: 5 batches on rank 0, 3 batches on rank 1"),
        ("limit", "have different numbers of batches: 4 batches on rank 0, 3 batches on rank 1"),
        ("unsized", "have different numbers of batches: further batches on rank 0, the last batch on rank 1"),
        ("-1", "at a window's last batch on rank 0, closing a window that is short on rank 1"),
        ("schedule", "Ranks have different hyperparameters: lr is 0.1 on rank 0, 0.05 on rank 1"),
    ],
)
@on_ranks()
def test_ranks_that_are_not_in_the_same_place_are_an_error_on_all_at_once(rank, how, message):
    """Before a window's reduction, where they would wait for each other."""

    def before(module, index):
        module.log("rank", float(module.current_epoch if rank else -module.current_epoch), on_epoch=True)

    module = (ScheduledApart if how == "schedule" else EndsEarly if how == "-1" and rank == 1 else Module)(before)
    rows = batches(rank)[: 5 - 2 * rank if how in ("loader", "unsized", "limit") else 4]
    loader = torch.utils.data.DataLoader(Unsized(rows), batch_size=None) if how == "unsized" else Rows(rows)
    limit = {"limit_train_batches": 4} if how == "limit" else {}
    said = error_of(lambda: fit(rank, 2, module, loader, max_epochs=3, **limit))
    assert said.startswith("WindowError")
    assert message in said


@pytest.mark.parametrize(("steps", "index"), [(2, 1), (2, 2), (1, 1)])
@on_ranks()
def test_a_rank_that_stops_alone_is_an_error_on_all_at_once(rank, tmp_path, steps, index):
    """It validates and saves then, and waited for the others there, and they for it, until the group's timeout."""
    saves = {"enable_checkpointing": True, "default_root_dir": str(tmp_path), "num_sanity_val_steps": 0}
    validation = Rows(batches(rank)[:1])

    def before(module, step):
        module.trainer.should_stop = rank == 1 and step == index

    with pytest.raises(WindowError, match="different places: before a batch on rank 0, stopping on rank 1"):
        fit(rank, steps, Module(before), validation=validation, max_epochs=3, **saves)


class Manual(Module):
    """Manual optimization: two wrapped optimizers on parts of the module, or TrainStep."""

    automatic_optimization = False

    def __init__(self, how):
        super().__init__()
        self.how = how

    def configure_optimizers(self):
        if self.how == "TrainStep":
            return sgd(self.network.parameters())
        halves = [*self.network.parameters()]
        parts = [halves] if self.how == "one" else [halves[:2], halves[2:]]
        return [Optimizer(sgd(part), 2) for part in parts]

    def on_fit_start(self):
        if self.how == "TrainStep":
            loss_fn = torch.nn.MSELoss()
            self.train_step = TrainStep(self.network, self.optimizers(), loss_fn=loss_fn, micro_batch_size=2)

    def training_step(self, batch, index):
        if self.how == "TrainStep":
            self.train_step(*batch)
            return
        optimizers = self.optimizers(use_pl_optimizer=False)
        self.manual_backward(mse(self.network, *batch))
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("how", ["one", "two"])
@on_ranks()
def test_wrapped_optimizers_under_manual_optimization_are_refused_with_advice_that_can_be_followed(rank, how):
    """Lightning makes the data-parallel model after the optimizers: `model=ddp` can't be passed there."""
    said = error_of(lambda: fit(rank, None, Manual(how)))
    assert said.startswith("ValueError")
    assert "DistributedDataParallel" in said
    assert "GradientAccumulation; or a loop with Fabric, where model = fabric.setup(model) comes first" in said


@on_ranks()
def test_train_step_under_manual_optimization_makes_the_update_of_all_ranks_rows(rank):
    check(fit(rank, None, Manual("TrainStep")), [*windows(1)] * 2)
