"""Inside Accelerate: a wrapped optimizer that is prepared makes the large batch's updates."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, TensorDataset

from gradaccum import WindowError
from gradaccum.torch.optim import Optimizer
from tests.reference import FLOAT64, relative_error, torch_updates
from tests.torch.problems import mse, network, regression, sgd


@pytest.fixture(autouse=True)
def accelerates_own_state(float64):
    """Accelerate keeps its state, that of accumulation too, for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def data():
    return tuple(t.double() for t in regression(24))


def loader(batch_size):
    return DataLoader(TensorDataset(*data()), batch_size=batch_size)


class Training:
    """A loop as Accelerate's guide has it, around a wrapped optimizer."""

    def __init__(self, scale=None, accumulated=1, **options):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
        if scale is not None:  # mixed_precision="fp16" makes one, on a GPU only
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        self.model = network()
        self.optimizer = Optimizer(sgd(self.model.parameters()), **{"steps": 3} | options)
        self.model, self.prepared = self.accelerator.prepare(self.model, self.optimizer)

    def run(self, batches, bad=None, clip=None):
        for index, (x, y) in enumerate(batches):
            with self.accelerator.accumulate(self.model):
                loss = mse(self.model, x, y)
                self.accelerator.backward(loss * float("inf") if index == bad else loss)
                if clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                self.prepared.step()
                self.prepared.zero_grad()

    def error(self, windows, **keywords):
        model, rows = network(), data()
        torch_updates(model, sgd(model.parameters()), [tuple(t[w] for t in rows) for w in windows], mse, **keywords)
        return relative_error(self.model.parameters(), model.parameters())


SIXES = [slice(0, 6), slice(6, 12), slice(12, 18), slice(18, 24)]


def test_prepared_it_makes_the_large_batches_updates():
    training = Training()
    training.run(training.accelerator.prepare(loader(2)))
    assert training.optimizer.updates == 4
    assert training.error(SIXES) <= FLOAT64


def test_batches_of_a_prepared_loader_know_rows_and_the_epochs_end():
    training = Training()
    training.run(training.optimizer.batches(training.accelerator.prepare(loader(5))))  # 5 + 5 + 5, 5 + 4
    assert training.optimizer.updates == 2
    assert training.error([slice(0, 15), slice(15, 24)]) <= FLOAT64


def test_accelerates_own_accumulation_is_refused():
    training = Training(accumulated=2)
    with pytest.raises(
        ValueError, match=r"Accelerator\(gradient_accumulation_steps=2\) accumulates as well.*Remove it"
    ):
        training.run(training.accelerator.prepare(loader(2)))


def test_accelerates_clipping_is_refused_and_the_wrappers_clips_the_large_batches_gradient():
    training = Training()
    with pytest.raises(WindowError, match=r"by clipping perhaps.*Pass clip_grad_norm= to the wrapper"):
        training.run(loader(2), clip=1e-2)
    training = Training(clip_grad_norm=1e-2)
    training.run(loader(2))
    assert training.error(SIXES, clip_grad_norm=1e-2) <= FLOAT64


@pytest.mark.parametrize("clip", [None, 1e-2])
def test_an_overflow_under_its_scaler_costs_one_window_and_halves_the_scale_once(clip):
    training = Training(scale=8.0, clip_grad_norm=clip)
    training.run(loader(2), bad=4)
    assert training.optimizer.updates == 3
    assert training.accelerator.scaler.get_scale() == 4.0
    assert training.error([SIXES[0], *SIXES[2:]], clip_grad_norm=clip) <= FLOAT64


def test_under_its_scaler_a_bad_micro_batch_can_be_left_out_alone():
    training = Training(scale=8.0, nonfinite="skip_micro_batch")
    training.run(loader(2), bad=4)
    assert training.optimizer.updates == 4
    assert training.error([SIXES[0], [6, 7, 10, 11], *SIXES[2:]]) <= FLOAT64


@pytest.mark.parametrize("scale", [None, 8.0])
def test_save_state_and_load_state_keep_the_open_window(tmp_path, scale):
    before = Training(scale)
    batches = list(loader(2))
    before.run(batches[:5])
    before.accelerator.save_state(tmp_path)
    after = Training(scale)
    after.accelerator.load_state(tmp_path)
    assert after.optimizer.micro_batches == 2
    after.run(batches[5:])
    assert after.optimizer.updates == 4
    assert after.error(SIXES) <= FLOAT64


def test_a_prepared_scheduler_steps_once_per_update():
    training = Training()
    scheduler = training.accelerator.prepare(torch.optim.lr_scheduler.StepLR(training.optimizer, 1, 0.5))
    model = network()
    inner = sgd(model.parameters())
    alone = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    for batch in training.accelerator.prepare(loader(2)):
        training.run([batch])
        if training.optimizer.updated:
            scheduler.step()
    torch_updates(model, inner, [tuple(t[w] for t in data()) for w in SIXES], mse, after_update=alone.step)
    assert relative_error(training.model.parameters(), model.parameters()) <= FLOAT64


@pytest.mark.parametrize("scale", [None, 8.0])
def test_wrapped_around_its_optimizer_it_is_refused_and_the_advice_can_be_followed(scale):
    accelerator = Accelerator(cpu=True)
    if scale is not None:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    inner = sgd(network().parameters())
    prepared = accelerator.prepare(inner)
    with pytest.raises(ValueError, match=r"accelerate has prepared .*Received: AcceleratedOptimizer.*Wrap first, then"):
        Optimizer(prepared, steps=3)
    accelerator.prepare(Optimizer(inner, steps=3))
