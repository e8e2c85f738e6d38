"""What the tests of Accelerate share: its state reset after each, and the loop of its guide."""

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, TensorDataset

from tests.reference import relative_error, torch_updates
from tests.torch.problems import mse, network, regression, sgd


@pytest.fixture(autouse=True)
def accelerates_own_state(float64):
    """Accelerate keeps its state, that of accumulation too, for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def data(rows):
    return tuple(t.to(torch.get_default_dtype()) for t in regression(rows))


def loader(rows, batch_size):
    return DataLoader(TensorDataset(*rows), batch_size=batch_size)


def with_scale(accelerator, scale):
    if scale is not None:  # mixed_precision="fp16" makes one, on a GPU only
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return accelerator


class Loop:
    """Of Accelerate's guide: an `accelerator`, a `model`, the `rows` that it sees, and what is `stepped`."""

    def run(self, batches, bad=None, clip=None, schedule=None):
        for index, batch in enumerate(batches):
            with self.accelerator.accumulate(self.model):
                found = mse(self.model, *batch)
                self.accelerator.backward(found * float("inf") if index == bad else found)
                if self.accelerator.sync_gradients and clip is not None:
                    self.clipped = self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                self.stepped.step()
                if schedule is not None:
                    schedule.step()
                self.stepped.zero_grad()
        return self

    def error(self, windows, hook=None, **keywords):
        """Of parameters, against ordinary updates from each window's rows."""
        model = network()
        inner = sgd(model.parameters())
        if hook is not None:
            inner.register_step_pre_hook(lambda *_: hook(model.parameters()) and None)
        torch_updates(model, inner, [tuple(t[w] for t in self.rows) for w in windows], mse, **keywords)
        return relative_error(self.model.parameters(), model.parameters())
