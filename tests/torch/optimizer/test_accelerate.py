"""Inside Accelerate: a wrapped optimizer that is prepared makes the large batch's updates."""

import pytest
from accelerate import Accelerator

from gradaccum import WindowError
from gradaccum.torch.optim import Optimizer
from tests.integrations import accelerate_problems
from tests.integrations.accelerate_problems import Loop, accelerates_own_state, data, with_scale
from tests.reference import FLOAT64
from tests.torch.problems import network, sgd

__all__ = ["accelerates_own_state"]


def loader(batch_size):
    return accelerate_problems.loader(data(24), batch_size)


class Training(Loop):
    """Around a wrapped optimizer."""

    def __init__(self, scale=None, accumulated=1, **options):
        self.accelerator = with_scale(Accelerator(cpu=True, gradient_accumulation_steps=accumulated), scale)
        self.optimizer = Optimizer(sgd((model := network()).parameters()), **{"steps": 3} | options)
        self.model, self.stepped = self.accelerator.prepare(model, self.optimizer)
        self.rows = data(24)


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


@pytest.mark.parametrize("scale", [None, 8.0])
def test_wrapped_around_its_optimizer_it_is_refused_and_the_advice_can_be_followed(scale):
    accelerator = with_scale(Accelerator(cpu=True), scale)
    inner = sgd(network().parameters())
    prepared = accelerator.prepare(inner)
    with pytest.raises(ValueError, match=r"accelerate has prepared .*Received: AcceleratedOptimizer.*Wrap first, then"):
        Optimizer(prepared, steps=3)
    accelerator.prepare(Optimizer(inner, steps=3))
