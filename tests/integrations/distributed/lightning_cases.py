"""What each rank does in the tests of Lightning's Trainer. Every case compares itself with one ordinary process."""

import logging
import os
import warnings

import torch

from gradaccum import WindowError
from gradaccum.torch import TrainStep
from gradaccum.torch.optim import Optimizer
from tests.reference import relative_error, torch_updates
from tests.torch.problems import mse, network, regression, sgd

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its dependencies, about each other
    import lightning.pytorch as lightning
    from lightning.pytorch.strategies import DDPStrategy

    from gradaccum.integrations.lightning import GradientAccumulation

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

SIZES = ([2, 2, 5, 1, 3], [4, 1, 1, 3, 2])
"""Rows of each batch of an epoch, on each rank."""


def batches(rank):
    x, y = (t.double() for t in regression(40))
    start = 20 * rank
    found = []
    for size in SIZES[rank]:
        found.append((x[start : start + size], y[start : start + size]))
        start += size
    return found


def windows(steps, count=5, left_out=()):
    """All ranks' rows of each window of an epoch."""
    for start in range(0, count, steps):
        indices = range(start, min(start + steps, count))
        rows = [batches(rank)[index] for rank in (0, 1) for index in indices if (rank, index) not in left_out]
        yield tuple(torch.cat(parts) for parts in zip(*rows, strict=True))


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
    def __init__(self):
        super().__init__()
        self.network = network(dtype=torch.float64)

    def configure_optimizers(self):
        return sgd(self.parameters())

    def training_step(self, batch, index):
        return mse(self.network, *batch)


class SaveAt(lightning.Callback):
    def __init__(self, index, path):
        self.index, self.path = index, path

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if index == self.index and trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


class StopAt(lightning.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        trainer.should_stop = index == 3


def fit(
    rank, steps, module, rows=None, callbacks=(), checkpoint=None, weight=None, ddp=None, validation=None, **keywords
):
    os.environ.update(
        TORCHELASTIC_RUN_ID="1", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
        GROUP_RANK="0",
    )  # fmt: skip
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(**(ddp or {})), use_distributed_sampler=False, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*callbacks, *([GradientAccumulation(steps, weight=weight)] if steps else [])],
        **{"max_epochs": 2, "enable_checkpointing": False} | keywords,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = Rows(batches(rank)) if rows is None else rows
        trainer.fit(module, rows, validation, ckpt_path=checkpoint, weights_only=False)
    return trainer


def error(module, large, **keywords):
    model = network(dtype=torch.float64)
    torch_updates(model, sgd(model.parameters()), large, mse, **keywords)
    return relative_error(module.network.parameters(), model.parameters())


def train(rank, steps, **keywords):
    """Returns (error, updates)."""
    module = Module()
    trainer = fit(rank, steps, module, **keywords)
    clip = keywords.get("gradient_clip_val")
    return error(module, [*windows(steps)] * 2, clip_grad_norm=clip), trainer.global_step


def weigh_nothing(rank, steps, silent):
    """Some batches, given as (rank, index), weigh nothing, and their loss is NaN. Returns the error."""
    rows = [(x, y * float("nan")) if (rank, index) in silent else (x, y) for index, (x, y) in enumerate(batches(rank))]
    module = Module()
    fit(
        rank,
        steps,
        module,
        Rows(rows),
        weight=lambda batch: 0 if batch[1].isnan().any() else len(batch[0]),
        max_epochs=1,
    )
    return error(module, [*windows(steps, left_out=silent)])


def stop(rank, steps):
    """Training stops inside a window. Returns (error, updates)."""
    module = Module()
    trainer = fit(rank, steps, module, callbacks=[StopAt()])
    return error(module, [*windows(steps, 4)]), trainer.global_step


def resume(rank, steps, index, folder):
    """Returns (error of the resumed training, updates)."""
    path = os.path.join(folder, "middle.ckpt")
    fit(rank, steps, Module(), callbacks=[SaveAt(index, path)])
    module = Module()
    trainer = fit(rank, steps, module, Rows(batches(rank), index + 1), checkpoint=path, max_epochs=3)
    return error(module, [*windows(steps)] * 3), trainer.global_step


def save(rank, steps, index, path):
    """Save in the second epoch, after this batch."""
    fit(rank, steps, Module(), callbacks=[SaveAt(index, path)])


def resume_alone(steps, index, path):
    """What two ranks have saved goes on in this process, which has the rows of both. Returns (error, updates)."""
    rows = [tuple(map(torch.cat, zip(*both, strict=True))) for both in zip(batches(0), batches(1), strict=True)]
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=3,
        enable_model_summary=False, callbacks=[GradientAccumulation(steps)],
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, Rows(rows, index + 1), ckpt_path=path, weights_only=False)
    return error(module, [*windows(steps)] * 3), trainer.global_step


class Apart(Module):
    """Rank 1 stops its epoch alone, fails alone, or has a schedule of its own."""

    def __init__(self, rank, how):
        super().__init__()
        self.other, self.how = rank == 1, how

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        if self.how != "schedule":
            return optimizer
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "rank"}}

    def on_train_batch_start(self, batch, index):
        return -1 if self.other and self.how == "-1" and index == 3 else None

    def training_step(self, batch, index):
        self.log("rank", float(self.current_epoch if self.other else -self.current_epoch), on_epoch=True)
        if self.other and self.how == "error" and index == 3:
            raise ArithmeticError("rank 1 failed")
        return super().training_step(batch, index)


class Unsized(torch.utils.data.IterableDataset):
    def __init__(self, found):
        self.found = found

    def __iter__(self):
        yield from self.found


def apart(rank, how):
    """What is said where ranks are not in the same place."""
    rows, limit = batches(rank)[: 5 - 2 * rank if how in ("loader", "unsized", "limit") else 4], {}
    if how == "limit":
        limit = {"limit_train_batches": 4}
    loader = torch.utils.data.DataLoader(Unsized(rows), batch_size=None) if how == "unsized" else Rows(rows)
    try:
        fit(rank, 2, Apart(rank, how), loader, max_epochs=3, **limit)
    except (ArithmeticError, WindowError) as error:
        return str(error)


class StopsAlone(Module):
    """Rank 1 alone stops training, which validates and saves then, and has the others wait for it there."""

    def __init__(self, rank, index):
        super().__init__()
        self.other, self.index = rank == 1, index

    def training_step(self, batch, index):
        self.trainer.should_stop = self.other and index == self.index
        return super().training_step(batch, index)

    def validation_step(self, batch, index):
        self.log("loss", mse(self.network, *batch), sync_dist=True)


def stop_alone(rank, steps, index, folder):
    """What each rank says."""
    saves = {"enable_checkpointing": True, "default_root_dir": folder, "num_sanity_val_steps": 0}
    try:
        fit(rank, steps, StopsAlone(rank, index), validation=Rows(batches(rank)[:1]), max_epochs=3, **saves)
    except WindowError as error:
        return str(error)


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
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        self.manual_backward(mse(self.network, *batch))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def manual(rank, how):
    """What each rank says, or the error of its updates."""
    module = Manual(how)
    try:
        fit(rank, None, module)
    except ValueError as refused:
        return str(refused)
    return error(module, [*windows(1)] * 2)
