"""What the tests of Lightning share: a module, its loader, a quiet Trainer, a GradScaler on a CPU, the truth."""

import contextlib
import logging
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.reference import relative_error, torch_updates
from tests.torch.problems import mse, network, regression, sgd

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its dependencies, about each other
    import lightning.pytorch as lightning
    from lightning.pytorch.plugins import MixedPrecision

    from gradaccum.integrations.lightning import GradientAccumulation

__all__ = ["GradientAccumulation", "lightning"]

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

MARKS = [
    pytest.mark.usefixtures("float64"),
    # Lightning's own, and those about it.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*overfit_batches:UserWarning"),
]


class Scaled(MixedPrecision):
    """16-bit precision's GradScaler, and float64 all the same."""

    def __init__(self, scale=8.0):
        super().__init__("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale))

    def autocast_context_manager(self):
        return contextlib.nullcontext()


def data():
    return tuple(t.to(torch.get_default_dtype()) for t in regression(24))


def loader(batch_size=2, rows=24):
    return DataLoader(TensorDataset(*(t[:rows] for t in data())), batch_size=batch_size)


class Resumable:
    """Goes on inside an epoch where it was, as torchdata's StatefulDataLoader."""

    def __init__(self, batches):
        self.batches, self.index, self.restored = batches, 0, None

    def __iter__(self):
        self.index, self.restored = self.restored or 0, None
        while self.index < len(self.batches):
            self.index += 1
            yield self.batches[self.index - 1]
        self.index = 0

    def state_dict(self):
        return {"index": self.index % len(self.batches)}

    def load_state_dict(self, state):
        self.restored = state["index"]


class Module(lightning.LightningModule):
    def __init__(self, make=sgd, loss=mse, skipped=()):
        super().__init__()
        self.network, self.make, self.loss, self.skipped = network(), make, loss, skipped

    def configure_optimizers(self):
        return self.make(self.network.parameters())

    def training_step(self, batch, index):
        return None if index in self.skipped else self.loss(self.network, *batch)


class StopAt(lightning.Callback):
    def __init__(self, index):
        self.index = index

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        trainer.should_stop = index == self.index


class SaveAfter(lightning.Callback):
    """Saves after so many batches."""

    def __init__(self, count, path):
        self.count, self.path, self.seen = count, path, 0

    def on_train_batch_end(self, trainer, *_):
        self.seen += 1
        if self.seen == self.count:
            trainer.save_checkpoint(self.path)


def quiet_trainer(**keywords):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    saves = any(isinstance(c, lightning.callbacks.ModelCheckpoint) for c in keywords.get("callbacks", ()))
    return lightning.Trainer(
        **{"max_epochs": 1, "accelerator": "cpu", "enable_checkpointing": saves} | quiet | keywords
    )


def fit(module, batches=None, checkpoint=None, validation=None, plugins=(), **keywords):
    """The trainer, having fitted. Plugins are given as what makes them."""
    trainer = quiet_trainer(plugins=[make() for make in plugins], **keywords)
    trainer.fit(module, loader() if batches is None else batches, validation, ckpt_path=checkpoint, weights_only=False)
    return trainer


def error(trained, large, make=sgd, loss=mse, rows=None, **keywords):
    """Of a network's parameters against ordinary steps on these large batches of rows."""
    model, rows = network(), rows or data()
    torch_updates(model, make(model.parameters()), [tuple(t[w] for t in rows) for w in large], loss, **keywords)
    return relative_error(trained.parameters(), model.parameters())


def averages(kind, module, *callbacks):
    """How often WeightAveraging has averaged in an epoch, the copy that it begins with included."""
    count = []

    def average(mean, new, number):
        count.append(int(number))
        return mean * 0.9 + new * 0.1

    callback = kind(avg_fn=average)
    callback.on_train_epoch_end = callback.on_train_end = lambda *_: None  # they would average, and swap
    fit(module, callbacks=[callback, *callbacks])
    return 1 + len(count) / len([*network().parameters()])
