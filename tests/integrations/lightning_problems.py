"""What the tests of Lightning share: its own warnings left out, a module and its rows, a GradScaler on a CPU."""

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

__all__ = ["MARKS", "GradientAccumulation", "Module", "Scaled", "data", "error", "lightning", "loader", "quiet_trainer"]

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


def quiet_trainer(**keywords):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return lightning.Trainer(**{"max_epochs": 1, "accelerator": "cpu", "logger": False} | quiet | keywords)


def data(rows=23):
    return tuple(t.to(torch.get_default_dtype()) for t in regression(rows))


def loader(batch_size=2, rows=None, of=23):
    return DataLoader(TensorDataset(*(t[:rows] for t in data(of))), batch_size=batch_size)


class Module(lightning.LightningModule):
    def __init__(self, make=sgd, loss=mse, skipped=()):
        super().__init__()
        self.network, self.make, self.loss, self.skipped = network(), make, loss, skipped

    def configure_optimizers(self):
        return self.make(self.network.parameters())

    def training_step(self, batch, index):
        return None if index in self.skipped else self.loss(self.network, *batch)


def error(module, windows, make=sgd, loss=mse, rows=None, **keywords):
    """Of parameters, against ordinary updates from each window's rows."""
    model, rows = network(), rows or data()
    large = [tuple(t[w] for t in rows) for w in windows]
    torch_updates(model, make(model.parameters()), large, loss, **keywords)
    return relative_error(module.network.parameters(), model.parameters())
