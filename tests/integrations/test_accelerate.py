"""`prepare_optimizer`: Accelerate's own loop makes the large batch's updates."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradaccum import WindowError
from gradaccum.integrations.accelerate import prepare_optimizer
from gradaccum.torch.optim import Optimizer
from tests.reference import FLOAT64, relative_error, torch_updates
from tests.torch.problems import mse, network, regression, sgd
from tests.torch.test_calls import Calls


@pytest.fixture(autouse=True)
def accelerates_own_state(float64):
    """Accelerate keeps its state, that of accumulation too, for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


ROWS = 23
WINDOWS = [slice(0, 15), slice(15, 23)]  # batches of 5, 5, 5 and of 5, 3


def data():
    return tuple(t.to(torch.get_default_dtype()) for t in regression(ROWS))


def loader(batch_size=5):
    return DataLoader(TensorDataset(*data()), batch_size=batch_size)


class Training:
    """The loop of Accelerate's guide."""

    def __init__(self, scale=None, steps=3, **options):
        self.accelerator = Accelerator(cpu=True)
        if scale is not None:  # mixed_precision="fp16" makes one, on a GPU only
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        self.model, self.loader = self.accelerator.prepare(network(), loader())
        self.inner = sgd(self.model.parameters())
        self.optimizer = self.wrapped = prepare_optimizer(self.accelerator, self.inner, steps, **options)

    def run(self, batches=None, bad=None, clip=None):
        for index, batch in enumerate(self.wrapped.batches(self.loader) if batches is None else batches):
            with self.accelerator.accumulate(self.model):
                loss = mse(self.model, *batch)
                self.accelerator.backward(loss * float("inf") if index == bad else loss)
                if self.accelerator.sync_gradients and clip is not None:
                    assert self.accelerator.clip_grad_norm_(self.model.parameters(), clip) is None
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self

    def error(self, windows=WINDOWS, hook=None, **keywords):
        model = network()
        inner = sgd(model.parameters())
        if hook is not None:
            inner.register_step_pre_hook(lambda *_: hook(model.parameters()) and None)
        torch_updates(model, inner, [tuple(t[w] for t in data()) for w in windows], mse, **keywords)
        return relative_error(self.model.parameters(), model.parameters())


def test_grad_norm_is_that_of_the_finished_gradient_before_clipping():
    norms = []
    training = Training()
    training.optimizer.register_step_post_hook(lambda *_: norms.append(training.optimizer.grad_norm.item()))
    training.run(clip=0.05)
    expected = []
    training.error(hook=lambda parameters: expected.append(nn.utils.clip_grad_norm_(parameters, 0.05).item()))
    assert norms == pytest.approx(expected, rel=FLOAT64)
    assert Training(clip_grad_norm=0.05).run().error(clip_grad_norm=0.05) <= FLOAT64, "the wrapper's own"


def test_clipping_of_a_window_that_is_dropped_is_not_done_in_the_next_one():
    training = Training()
    training.run([next(iter(loader()))], clip=1e-3)
    training.optimizer.discard()
    assert training.run().error() <= FLOAT64


def test_clipping_of_other_parameters_is_accelerates_own_and_of_two_optimizers_at_once_refused():
    training, other = Training(), network(1)
    clip = training.accelerator.clip_grad_norm_
    mse(other, *data()).backward()
    assert clip(other.parameters(), 1e-3) > 1e-3
    assert nn.utils.get_total_norm([p.grad for p in other.parameters()]) <= 1e-3
    prepare_optimizer(training.accelerator, sgd(other.parameters()), 2)
    with pytest.raises(ValueError, match="parameters of 2 optimizers, whose windows close at different times"):
        clip([*training.model.parameters(), *other.parameters()], 1.0)


def test_steps_and_flush_and_batches_are_the_wrappers():
    training = Training(steps={0: 5, 1: 2})
    assert (training.optimizer.steps, training.optimizer.inner) == (5, training.inner)
    training.run()
    assert training.optimizer.steps == 2
    training.optimizer.steps = 4
    assert training.optimizer.optimizer.steps == 4
    assert isinstance(training.optimizer, torch.optim.Optimizer)
    with pytest.raises(AttributeError, match="no_such_thing"):
        training.optimizer.no_such_thing  # noqa: B018
    assert training.accelerator.prepare(training.optimizer) is training.optimizer


# The loader's own knowledge of its end.


def test_batches_of_an_accelerate_loader_go_on_where_they_were_saved():
    training, again, seen = Training(), Training(), []

    def run(training, batches, stop=None):
        for index, (x, _) in enumerate(batches):
            seen.append(x)
            training.optimizer.backward(training.model(x).mean())
            training.optimizer.step()
            if index == stop:
                return

    run(training, batches := training.optimizer.batches(training.loader), stop=1)
    again.optimizer.load_state_dict(training.optimizer.state_dict())
    others = again.optimizer.batches(again.loader)
    others.load_state_dict(batches.state_dict())
    run(again, others)
    assert torch.equal(torch.cat(seen), data()[0])


def test_several_steps_per_batch_leave_the_window_open_and_the_log_has_it(caplog):
    training = Training(steps=4)
    for batch in training.loader:  # 5 batches
        for part in zip(*(t.split(3) for t in batch)):
            training.run([part])
    assert (training.optimizer.updates, training.optimizer.micro_batches) == (2, 1)
    assert "more often than the loader has batches (5)" in caplog.text


def test_a_second_step_in_the_last_batch_is_an_error_where_the_first_one_closed_the_window():
    training = Training(steps=4)
    (batch,) = rows = training.accelerator.prepare(loader(batch_size=ROWS))
    for _ in range(2):
        for batch in rows:
            training.run([batch])
    assert training.optimizer.updates == 2
    with pytest.raises(WindowError, match="again in the loader's last batch"):
        for batch in rows:
            training.run([batch, batch])


def test_a_progress_bar_inside_of_batches_is_named(caplog):
    training = Training()

    class Bar:
        iterable = training.loader

        def __iter__(self):
            return iter(self.iterable)

    training.run(training.optimizer.batches(Bar()))
    assert "tqdm(optimizer.batches(loader))" in caplog.text
    assert training.error() <= FLOAT64


@pytest.mark.parametrize("layers", [1, 30])
def test_an_open_micro_batch_makes_few_calls_with_any_number_of_parameters(layers):
    """Accelerate's own optimizer makes some 600. In windows that look at nothing, which the 3rd is."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers))))
    optimizer, calls = prepare_optimizer(accelerator, sgd(model.parameters()), 4), []
    for _ in range(12):
        accelerator.backward(model(torch.ones(2, 3)).sum())
        with Calls() as counted:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        calls.append(counted.names.total())
    assert max(calls[8:11]) <= 60, calls


# Refused.


def refused(optimizer=None, accelerator=None, accumulated=1):
    """Prepared for windows of 3: by default plain SGD, and a plain Accelerator."""
    one = Accelerator(cpu=True, gradient_accumulation_steps=accumulated) if accelerator is None else accelerator
    inner = sgd(network().parameters())
    return prepare_optimizer(one, inner if optimizer is None else optimizer(one, inner), 3)


def accumulates_later():
    training = Training()
    training.accelerator.gradient_accumulation_steps = 2
    training.run()


PREPARED = r"prepared already. Remove it from accelerator.prepare"
REFUSED = {
    "configured twice": (lambda: refused(accumulated=2), r"gradient_accumulation_steps=2\). Remove it"),
    "configured later": (accumulates_later, r"both accumulate. Received: Accelerator\(gradient_accumulation_steps=2\)"),
    "prepared twice": (lambda: refused(lambda one, inner: prepare_optimizer(one, inner, 3)), PREPARED),
    "prepared by Accelerate": (lambda: refused(lambda one, inner: one.prepare(inner)), PREPARED),
    "wrapped": (lambda: refused(lambda one, inner: Optimizer(inner, 2)), "wrapped already"),
    "no Accelerator": (lambda: refused(accelerator=network()), "`accelerator` must be an Accelerator. Received: Seq"),
    "no optimizer": (lambda: refused(lambda *_: "adam"), "`optimizer` must be a torch.optim.Optimizer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_accumulates_twice_or_is_of_another_type_is_refused(case):
    run, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=message):
        run()


def test_an_accelerate_that_lacks_a_name_or_distributes_otherwise_is_refused(monkeypatch):
    monkeypatch.setattr("gradaccum.integrations.accelerate._KNOWN", ())
    with pytest.raises(ValueError, match=r"Received: an Accelerator of type NO. Remove its plugin"):
        refused()
    monkeypatch.delattr(Accelerator, "clip_grad_value_")
    with pytest.raises(ValueError, match=r"accelerate 1.*has no clip_grad_value_ in its accelerator"):
        refused()


# A wrapped optimizer that Accelerate prepares; what it makes of an epoch is in fuzz/accelerate_runs.py.


class Prepared(Training):
    def __init__(self, scale=None, accumulated=1, **options):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
        self.accelerator.scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        self.model, self.loader = self.accelerator.prepare(network(), loader())
        self.wrapped = Optimizer(sgd(self.model.parameters()), **{"steps": 3} | options)
        self.optimizer = self.accelerator.prepare(self.wrapped)


@pytest.mark.parametrize("how", [Training, Prepared])
def test_an_overflow_costs_a_window_and_halves_the_scale_once(how):
    training = how(8.0).run(bad=2)
    assert training.accelerator.scaler.get_scale() == 4.0
    assert training.error(WINDOWS[1:]) <= FLOAT64


def clipping(training, clip):
    for batch in training.loader:
        training.accelerator.backward(mse(training.model, *batch))
        clip(training.model.parameters(), 1e-3)
        training.optimizer.step()
        training.optimizer.zero_grad()


def test_accelerates_own_accumulation_and_clipping_are_refused_around_a_wrapped_one_and_pytorchs_in_a_window():
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=2\) accumulates as well.*Remove it"):
        Prepared(accumulated=2).run([*loader()])
    with pytest.raises(WindowError, match=r"by clipping perhaps.*Pass clip_grad_norm= to the wrapper"):
        clipping(prepared := Prepared(), prepared.accelerator.clip_grad_norm_)
    with pytest.raises(WindowError, match="edited inside an open window"):
        clipping(Training(), nn.utils.clip_grad_norm_)


@pytest.mark.parametrize("scale", [None, 8.0])
def test_wrapped_around_a_prepared_optimizer_it_is_refused_and_the_advice_can_be_followed(scale):
    training = Training(scale)
    inner = sgd(network().parameters())
    with pytest.raises(ValueError, match=r"accelerate has prepared .*Received: AcceleratedOptimizer.*Wrap first, then"):
        Optimizer(training.accelerator.prepare(inner), steps=3)
    training.accelerator.prepare(Optimizer(inner, steps=3))
