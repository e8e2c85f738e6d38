"""What the tests of Lightning share: its own warnings left out, a quiet Trainer, a GradScaler on a CPU."""

import contextlib
import logging
import warnings

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its dependencies, about each other
    import lightning.pytorch as lightning
    from lightning.pytorch.plugins import MixedPrecision

    from gradaccum.integrations.lightning import GradientAccumulation

__all__ = ["MARKS", "GradientAccumulation", "SaveAt", "Scaled", "lightning", "quiet_trainer"]

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


class SaveAt(lightning.Callback):
    """Saves in the second epoch, after this batch."""

    def __init__(self, index, path):
        self.index, self.path = index, path

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if index == self.index and trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


def quiet_trainer(**keywords):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return lightning.Trainer(**{"max_epochs": 1, "accelerator": "cpu", "logger": False} | quiet | keywords)
