"""Inside Accelerate: a wrapped optimizer that is prepared makes the large batch's updates."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, TensorDataset

from gradaccum import WindowError
from gradaccum.torch.optim import Optimizer
from tests.reference import torch_updates
from tests.torch.optimizer.loops import assert_same, scaler_of
from tests.torch.problems import mse, network, regression, sgd


@pytest.fixture(autouse=True)
def accelerates_own_state(float64):
    """Accelerate keeps its state, that of accumulation too, for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def loader(batch_size):
    return DataLoader(TensorDataset(*regression(24)), batch_size=batch_size)


def accelerator_of(scale, **options):
    accelerator = Accelerator(cpu=True, **options)
    if scale is not None:  # mixed_precision="fp16" makes one, on a GPU only
        accelerator.scaler = scaler_of(scale)
    return accelerator


class Training:
    """A loop as Accelerate's guide has it, around a wrapped optimizer."""

    def __init__(self, scale=None, accumulated=1, **options):
        self.accelerator = accelerator_of(scale, gradient_accumulation_steps=accumulated)
        self.optimizer = Optimizer(sgd((model := network()).parameters()), **{"steps": 3} | options)
        self.model, self.prepared = self.accelerator.prepare(model, self.optimizer)

    def run(self, batches, bad=None, clip=None):
        for index, (x, y) in enumerate(batches):
            with self.accelerator.accumulate(self.model):
                loss = mse(self.model, x, y)
                self.accelerator.backward(loss * float("inf") if index == bad else loss)
                if clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                self.prepared.step()
                self.prepared.zero_grad()
        return self


def large(windows, inner=None, model=None, **keywords):
    model, rows = model or network(), regression(24)
    inner = inner or sgd(model.parameters())
    torch_updates(model, inner, [tuple(t[w] for t in rows) for w in windows], mse, **keywords)
    return model


SIXES = [slice(0, 6), slice(6, 12), slice(12, 18), slice(18, 24)]
LEFT = [SIXES[0], [6, 7, 10, 11], *SIXES[2:]]


@pytest.mark.parametrize(
    ("options", "bad", "windows"),
    [
        ({}, None, SIXES),
        ({"clip_grad_norm": 1e-2}, None, SIXES),
        # An overflow under its scaler costs one window and halves the scale once; or one micro-batch.
        ({"scale": 8.0}, 4, [SIXES[0], *SIXES[2:]]),
        ({"scale": 8.0, "clip_grad_norm": 1e-2}, 4, [SIXES[0], *SIXES[2:]]),
        ({"scale": 8.0, "nonfinite": "skip_micro_batch"}, 4, LEFT),
    ],
)
def test_prepared_it_makes_the_large_batches_updates(options, bad, windows):
    training = Training(**options)
    training.run(training.accelerator.prepare(loader(2)), bad=bad)
    assert training.optimizer.updates == len(windows)
    assert_same(training.model, large(windows, clip_grad_norm=options.get("clip_grad_norm")))
    assert bad is None or training.accelerator.scaler.get_scale() == 4.0


def test_batches_of_a_prepared_loader_know_rows_and_the_epochs_end():
    training = Training()
    training.run(training.optimizer.batches(training.accelerator.prepare(loader(5))))  # 5 + 5 + 5, 5 + 4
    assert training.optimizer.updates == 2
    assert_same(training.model, large([slice(0, 15), slice(15, 24)]))


def test_accelerates_own_accumulation_and_clipping_are_refused():
    with pytest.raises(
        ValueError, match=r"Accelerator\(gradient_accumulation_steps=2\) accumulates as well.*Remove it"
    ):
        Training(accumulated=2).run(loader(2))
    with pytest.raises(WindowError, match=r"by clipping perhaps.*Pass clip_grad_norm= to the wrapper"):
        Training().run(loader(2), clip=1e-2)


@pytest.mark.parametrize("scale", [None, 8.0])
def test_save_state_and_load_state_keep_the_open_window(tmp_path, scale):
    batches = list(loader(2))
    Training(scale).run(batches[:5]).accelerator.save_state(tmp_path)
    after = Training(scale)
    after.accelerator.load_state(tmp_path)
    assert after.optimizer.micro_batches == 2
    assert after.run(batches[5:]).optimizer.updates == 4
    assert_same(after.model, large(SIXES))


def test_a_prepared_scheduler_steps_once_per_update():
    training, model = Training(), network()
    scheduler = training.accelerator.prepare(torch.optim.lr_scheduler.StepLR(training.optimizer, 1, 0.5))
    inner = sgd(model.parameters())
    alone = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    for batch in training.accelerator.prepare(loader(2)):
        training.run([batch])
        if training.optimizer.updated:
            scheduler.step()
    assert_same(training.model, large(SIXES, inner, model, after_update=alone.step))


@pytest.mark.parametrize("scale", [None, 8.0])
def test_wrapped_around_its_optimizer_it_is_refused_and_the_advice_can_be_followed(scale):
    accelerator, inner = accelerator_of(scale), sgd(network().parameters())
    with pytest.raises(ValueError, match=r"accelerate has prepared .*Received: AcceleratedOptimizer.*Wrap first, then"):
        Optimizer(accelerator.prepare(inner), steps=3)
    accelerator.prepare(Optimizer(inner, steps=3))
