"""`GradientAccumulation` under Lightning's Trainer: each window's update is that of its rows as one batch.

Ragged batches, tables of steps, schedulers, clipping, weights, stops and resumed runs: fuzz/lightning_runs.py.
"""

import functools
import re
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradaccum import WindowError
from gradaccum.torch.optim import Optimizer
from tests.documents import ROOT
from tests.integrations import lightning_problems as problems
from tests.integrations.lightning_problems import MARKS, GradientAccumulation, Module, Scaled, data, lightning
from tests.reference import FLOAT32, FLOAT64, relative_error
from tests.torch.problems import adam, classes, mse, network, sgd
from tests.torch.test_calls import Calls

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its dependencies, about each other
    import lightning as lightning_itself
    from lightning.pytorch.callbacks import (
        GradientAccumulationScheduler,
        ModelCheckpoint,
        StochasticWeightAveraging,
        TQDMProgressBar,
        WeightAveraging,
    )

pytestmark = MARKS

ROWS = 23
BATCHES = [slice(i, min(i + 2, ROWS)) for i in range(0, ROWS, 2)]  # 11 of 2 rows and one of 1
loader = functools.partial(problems.loader, rows=ROWS)


def windows(steps, count=None):
    """The rows of each window of an epoch."""
    batches = BATCHES[:count]
    return [
        slice(part[0].start, part[-1].stop) for i in range(0, len(batches), steps) if (part := batches[i : i + steps])
    ]


def fit(module, steps=4, batches=None, callbacks=(), weight=None, **keywords):
    accumulation = GradientAccumulation(steps, weight=weight)
    return problems.fit(module, batches or loader(), callbacks=[*callbacks, accumulation], **keywords)


def error(module, large, *arguments, **keywords):
    return problems.error(module.network, large, *arguments, **keywords)


# Windows.


class Meddling(Module):
    """Does something to its parameters in one batch, in a hook or in place of one."""

    def __init__(self, hook, batch, change):
        super().__init__()
        self.hook, self.batch, self.change, self.asked = hook, batch, change, 0

    def meddle(self, hook):
        """Whether it has."""
        self.asked += hook == self.hook
        if hook != self.hook or self.asked != self.batch:
            return False
        self.change([*self.parameters()])
        return True

    def on_after_backward(self):
        self.meddle("on_after_backward")

    def training_step(self, batch, index):
        self.meddle("training_step")
        return super().training_step(batch, index)

    def optimizer_zero_grad(self, *arguments):
        if not self.meddle("optimizer_zero_grad"):
            super().optimizer_zero_grad(*arguments)

    def on_train_batch_end(self, outputs, batch, index):
        self.meddle("on_train_batch_end")


def nothing(parameters):
    """Gradients stay."""


def edit(parameters):
    for parameter in parameters:
        parameter.grad.mul_(2)


def clear(parameters):
    for parameter in parameters:
        parameter.grad = None


def edit_in_each_pass(parameters):
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: edit([p]))


def edit_one(parameters):
    parameters[1].grad.mul_(3)


def make_a_pass(parameters):
    parameters[1].square().sum().backward()


def clamp(parameters):
    parameters[1].data.clamp_(-0.1, 0.1)


def swap(parameters):
    """As averaged weights are swapped for validation, and back."""
    parameters[1].data.mul_(2)
    parameters[1].data.div_(2)


FIRST = 1, 4, 10, 22
"""The first batches of windows 1, 2, 4 and 8 of 3, which are watched."""
MEDDLING = [
    # the window, where and in which batches something is done to gradients, and what is named
    (4, "optimizer_zero_grad", (2, 3, 4, 6), nothing, "left"),
    (4, "clipped, optimizer_zero_grad", (2, 3, 4, 6), nothing, "left"),
    (4, "on_after_backward", (1, 3, 9, 11), edit, "edited"),
    (4, "training_step", (2, 4, 10, 12, 24), clear, "cleared"),
    (4, "training_step", (1, 9), edit_in_each_pass, "edited"),
    *((3, "on_train_batch_end", FIRST, change, "edited") for change in (make_a_pass, edit_one)),
]


@pytest.mark.parametrize(("steps", "hook", "batches", "change", "found"), MEDDLING)
def test_what_is_done_to_gradients_inside_a_window_is_named(steps, hook, batches, change, found):
    """Windows 3, 5 and 6 are none that are looked at. In them a hook that edits in each pass is named in the third."""
    clip = {"gradient_clip_val": 0.05} if hook.startswith("clipped") else {}
    for batch in batches:
        module = Meddling(hook.rpartition(" ")[2], batch, change)
        with pytest.raises(WindowError, match=f"were {found} inside an open window.*gradient_clip_val"):
            fit(module, steps, max_epochs=2, **clip)
        assert module.trainer.global_step == (batch - 1 if found == "left" else (batch - 1) // steps)


@pytest.mark.parametrize("change", [clamp, swap])
def test_parameters_that_change_inside_a_watched_window_are_named(change, caplog):
    for first in FIRST:
        fit(Meddling("on_train_batch_end", first, change), 3, max_epochs=2)
    assert caplog.text.count("The parameters changed inside an open window") == len(FIRST) * (change is clamp)


@pytest.mark.parametrize("first", FIRST)
def test_gradients_of_a_pass_before_the_windows_first_are_cleared_by_lightning_or_named(first):
    module = Meddling("training_step", first, make_a_pass)
    fit(module, 3, max_epochs=2)
    assert error(module, windows(3) * 2) <= FLOAT64
    module = Meddling("training_step", first, make_a_pass)
    module.optimizer_zero_grad = lambda *_: module.asked == first or module.zero_grad()
    with pytest.raises(WindowError, match="were left inside an open window"):
        fit(module, 3, max_epochs=2)


def test_a_finished_gradient_may_be_edited():
    fit(Meddling("on_after_backward", 12, edit), 4, max_epochs=2)


class Counting(Module):
    """Counts calls from one training_step to the next."""

    def __init__(self):
        super().__init__()
        self.between, self.counts = Calls(), []

    def training_step(self, batch, index):
        self.between.__exit__()
        self.counts.append(self.between.names.total())
        loss = super().training_step(batch, index)
        self.between = Calls().__enter__()
        return loss


def test_an_ordinary_window_makes_no_more_calls_than_lightnings_own():
    """The 11th, in epochs of three. No clock: a look in every window shows here."""
    ours, theirs = Counting(), Counting()
    try:
        fit(ours, 4, max_epochs=4)
        problems.fit(theirs, loader(), accumulate_grad_batches=4, max_epochs=4)
    finally:
        sys.setprofile(None)
    *opened, closed = (a - b for a, b in zip(ours.counts[41:45], theirs.counts[41:45], strict=True))
    assert max(opened) < 0
    assert closed <= 10


class BatchAlone(Module):
    """Its training_step takes the batch's number in its first batches alone."""

    def training_step(self, batch, index):
        assert index < 3
        if index == 2:
            self.training_step = functools.partial(super().training_step, index=None)
        return super().training_step(batch, index)


class Subclassed(GradientAccumulation):
    ended = 0

    def on_train_batch_end(self, *arguments):
        self.ended += 1


def test_what_a_training_step_takes_may_change_and_hooks_of_a_subclass_are_called():
    module, accumulation = BatchAlone(), Subclassed(4)
    one = problems.fit(module, loader(), callbacks=[accumulation])
    assert error(module, windows(4)) <= FLOAT64
    assert accumulation.ended == len(BATCHES)
    replaced = {*vars(accumulation), *vars(one.precision_plugin), *vars(one.fit_loop.epoch_loop)}
    assert not replaced & {"on_before_zero_grad", "on_train_batch_end", "backward", "_build_kwargs"}, "as they were"


class Slower(lightning.Callback):
    """A lower learning rate, after each batch or before each update."""

    def __init__(self, hook):
        setattr(self, hook, self.lower)

    def lower(self, trainer, *rest):
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= 0.5


@pytest.mark.parametrize(("hook", "said"), [("on_train_batch_end", 2), ("on_before_optimizer_step", 0)])
def test_a_learning_rate_that_changes_inside_a_window_is_named(hook, said, caplog):
    """In windows 1, 2, 4, 8, ..., of which an epoch of 12 batches has two."""
    fit(Module(), 4, callbacks=[Slower(hook)])
    assert caplog.text.count("Hyperparameters changed, lr from ") == said
    assert said == 0 or "lr from 0.1 to 0.05 inside an open window" in caplog.text


def labelled(size, ignored, batch_size, without=()):
    """Of a loss that is a mean over the rows whose class is not ignored."""
    x, y = classes(size)
    y[list(without)] = ignored
    return {
        "rows": (x.double(), y),
        "batches": lambda: DataLoader(TensorDataset(x.double(), y), batch_size=batch_size),
        "loss": lambda model, x, y: nn.functional.cross_entropy(model(x), y, ignore_index=ignored),
        "weight": lambda batch: (batch[1] != ignored).sum(),
    }


def without(batch):
    return [[row for row in range(w.start, w.stop) if row // 2 != batch] for w in windows(4)]


CASES = {
    "in float32": {"steps": 5, "max_epochs": 2, "large": windows(5) * 2, "dtype": torch.float32},
    "weights": labelled(ROWS, 0, 5) | {"large": [slice(0, 20), slice(20, ROWS)]},
    **{
        f"a loss of NaN that weighs 0, batch {batch}": labelled(12, 9, 2, [2 * batch, 2 * batch + 1])
        | {"large": [slice(0, 8), slice(8, 12)]}
        for batch in (0, 3, 5)
    },
    **{f"None for batch {batch}": {"skipped": [batch], "large": without(batch)} for batch in (0, 2, 3, 11)},
    "None for an epoch's only batch of a window": {"steps": 11, "skipped": [11], "large": [slice(0, 22)], "updates": 2},
    "overfit_batches": {"overfit_batches": 3, "max_epochs": 2, "large": windows(4, count=3) * 2},
    "fast_dev_run": {"fast_dev_run": 3, "large": windows(4, count=3)},
    "GradScaler, clipped and stopped": {
        "steps": 5, "plugins": [Scaled], "callbacks": [problems.StopAt(7)], "gradient_clip_val": 0.05,
        "large": windows(5, count=8), "clip_grad_norm": 0.05,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_windows_make_the_large_batches_updates(case):
    options = {"make": sgd, "loss": mse, "rows": None, "clip_grad_norm": None} | CASES[case]
    expected = {name: options.pop(name) for name in ("large", "make", "loss", "rows", "clip_grad_norm")}
    torch.set_default_dtype(options.pop("dtype", torch.float64))
    module = Module(expected["make"], expected["loss"], options.pop("skipped", ()))
    updates, batches = options.pop("updates", len(expected["large"])), options.pop("batches", loader)
    one = fit(module, options.pop("steps", 4), batches(), **options)
    assert one.global_step == updates
    assert error(module, **expected) <= (FLOAT32 if case == "in float32" else FLOAT64)
    assert one.accumulate_grad_batches == 1, "as it was"


class Bar(TQDMProgressBar):
    """Notes where its bar has come to after each batch, and how far training has come by then."""

    seen = ()

    def on_train_batch_end(self, trainer, *rest):
        super().on_train_batch_end(trainer, *rest)
        self.seen = [*self.seen, (self.train_progress_bar.n, self.train_progress_bar.total, trainer.global_step)]


def test_the_progress_bar_counts_batches_and_global_step_updates():
    bar, count = Bar(), len(BATCHES)
    fit(Module(), 4, callbacks=[bar], enable_progress_bar=True)
    assert bar.seen == [(n, count, (n + 3 * (n == count)) // 4) for n in range(1, count + 1)]


def test_a_window_that_weighs_nothing_makes_no_update(caplog):
    module = Module()
    fit(module, 6, loader(rows=12), weight=lambda batch: 0)
    assert error(module, []) == 0
    assert "No update: the total weight of this window's 6 micro-batches is 0" in caplog.text


# Where training stops inside a window.


def test_a_hook_of_one_module_that_ends_epochs_inside_a_window_is_put_back():
    """It was deleted when training ended. Schedulers, and a hook of the class: fuzz/lightning_runs.py."""
    asked, module = [], Module()
    module.on_train_batch_start = hook = lambda batch, index: -1 if asked.append(index) or index == 6 else None
    assert fit(module, 4, max_epochs=2).global_step == 4
    assert error(module, windows(4, count=6) * 2) <= FLOAT64
    assert vars(module)["on_train_batch_start"] is hook
    assert asked == [*range(7)] * 2


class Scheduled(Module):
    """Halves its rate with each update, and ends its first epoch between windows, where the strategy raises."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        halved = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halved, "interval": "step"}}

    def on_train_batch_start(self, batch, index):
        return -1 if self.ends and index == 4 else None


def test_an_error_as_a_module_ends_an_epoch_between_windows_takes_no_step_from_a_later_scheduler(monkeypatch):
    module, trainer = Scheduled(), problems.quiet_trainer(callbacks=[GradientAccumulation(1)])

    def raises(batch, index):
        if module.ends and index == 4:
            raise OSError("lost")

    monkeypatch.setattr(trainer.strategy, "on_train_batch_start", raises)
    module.ends = True
    with pytest.raises(OSError, match="lost"):
        trainer.fit(module, loader())
    module.ends = False
    trainer.fit(module, loader())
    (scheduler,) = [config.scheduler for config in trainer.lr_scheduler_configs]
    assert scheduler.last_epoch == 12


class Failing(Module):
    """Raises once, in one batch's forward pass or after its backward pass."""

    where, batches = None, 0

    def training_step(self, batch, index):
        self.batches += 1
        self.fail("forward")
        return super().training_step(batch, index)

    def backward(self, loss):
        super().backward(loss)
        self.fail("backward")

    def fail(self, where):
        if where == self.where and self.batches == 7:
            self.where = None
            raise OSError("lost")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_error_inside_a_window_it_is_named_and_the_trainer_can_be_used_again(where, caplog):
    """A checkpoint leaves the window out where the sum holds a part of a micro-batch."""
    saved, accumulation = [], GradientAccumulation(4)
    saving = lightning.Callback()
    saving.on_exception = lambda *_: saved.append(accumulation.state_dict())
    module, one = Failing(), problems.quiet_trainer(callbacks=[saving, accumulation])
    module.where = where
    with pytest.raises(OSError, match="lost"):
        one.fit(module, loader())
    assert "Training has ended inside an open window of 2 micro-batches, which has made no update" in caplog.text
    assert ("window" in saved[0]) is (where == "forward")
    assert ("The checkpoint leaves out the open window" in caplog.text) is (where == "backward")
    module.network = network()
    one.fit(module, loader())
    assert error(module, windows(4)) <= FLOAT64


def test_weight_averaging_averages_once_per_update():
    assert problems.averages(WeightAveraging, Module(), GradientAccumulation(5)) == 3


@pytest.mark.filterwarnings("ignore:.*in eval mode:UserWarning")
@pytest.mark.parametrize("accumulation_first", [True, False])
def test_stochastic_weight_averaging_averages_exact_epochs(accumulation_first):
    """With its pass over the data for BatchNorm, in which nothing is updated."""

    def epochs(steps, batches):
        module = Module()
        torch.manual_seed(0)
        module.network = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))
        module.network[1].eval().requires_grad_(False)
        callbacks = [GradientAccumulation(steps), StochasticWeightAveraging(0.1, swa_epoch_start=1)]
        problems.fit(module, batches, callbacks=callbacks if accumulation_first else callbacks[::-1], max_epochs=3)
        return module.network.parameters()

    assert relative_error(epochs(5, loader(2)), epochs(1, loader(10))) <= FLOAT64


def test_estimated_stepping_batches_are_the_updates():
    found = []

    class Asking(Module):
        def configure_optimizers(self):
            found.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    assert fit(Asking(), 5, max_epochs=2).global_step == found[0] == 6
    with pytest.raises(ValueError, match="Count the updates of each epoch yourself"):
        fit(Asking(), {0: 5, 1: 2}, max_epochs=2)


# Precision.


@pytest.mark.parametrize("how", ["overflow", "None"])
def test_under_a_gradscaler_an_overflow_or_none_for_its_last_batch_costs_one_window(how, caplog):
    """For None Lightning makes no step."""

    def loss(model, x, y):
        return mse(model, x, y) * (float("inf") if how == "overflow" and torch.equal(x[0], data()[0][4]) else 1)

    module, plugin = Module(loss=loss, skipped=[4] if how == "None" else ()), Scaled()
    fit(module, 5, plugins=[lambda: plugin])
    assert plugin.scaler.get_scale() == (4 if how == "overflow" else 8), "halved once"
    assert error(module, windows(5)[1:]) <= FLOAT64
    said = "Discarding an open window of 4 micro-batches: its last batch was None, or training_step" in caplog.text
    assert said is (how == "None")


def test_in_mixed_precision_windows_sum_and_divide_in_the_parameters_precision():
    """Weights that are powers of two, under which bfloat16 rounds the same."""
    torch.set_default_dtype(torch.float32)
    module, model = Module(), network()
    fit(module, 4, precision="bf16-mixed")
    inner = sgd(model.parameters())
    for window in (BATCHES[:4], BATCHES[4:8], BATCHES[8:]):
        inner.zero_grad()
        for rows in window:
            with torch.autocast("cpu", torch.bfloat16):
                loss = mse(model, *(t[rows] for t in data()))
            (loss * (rows.stop - rows.start)).backward()
        for parameter in model.parameters():
            parameter.grad /= window[-1].stop - window[0].start
        inner.step()
    assert relative_error(module.network.parameters(), model.parameters()) <= FLOAT32


# Files.


@pytest.mark.parametrize(("index", "plugins"), [(5, []), (4, [Scaled]), (7, [Scaled])], ids=str)
def test_resumed_inside_a_window_training_is_the_same_bit_for_bit(tmp_path, index, plugins):
    path, steps = tmp_path / "middle.ckpt", {0: 3, 1: 5}
    whole, resumed = Module(adam), Module(adam)
    fit(whole, steps, max_epochs=3, callbacks=[problems.SaveAfter(len(BATCHES) + index + 1, path)], plugins=plugins)
    batches = problems.Resumable([*loader()])
    batches.load_state_dict({"index": index + 1})
    one = fit(resumed, steps, batches, checkpoint=path, max_epochs=3, plugins=plugins)
    assert one.global_step == 4 + 3 + 3
    assert error(resumed, windows(3) + windows(5) * 2, adam) <= FLOAT64
    assert relative_error(resumed.network.parameters(), whole.network.parameters()) == 0


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
def test_model_checkpoint_saves_by_updates_and_resumes(tmp_path):
    checkpoints = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    fit(Module(), 5, max_epochs=2, callbacks=[checkpoints])
    assert {path.stem for path in tmp_path.iterdir()} == {"step=2", "step=4", "step=6"}
    module = Module()
    fit(module, 5, max_epochs=3, callbacks=[checkpoints], checkpoint=tmp_path / "step=6.ckpt")
    assert error(module, windows(5) * 3) <= FLOAT64


def test_resuming_inside_a_window_of_another_length_is_refused(tmp_path):
    path = tmp_path / "middle.ckpt"
    fit(Module(), 5, max_epochs=2, callbacks=[problems.SaveAfter(len(BATCHES) + 6, path)])
    says = r"inside a window of 5 steps \(1 of them done\).*steps=4 there. Resume with 5"
    with pytest.raises(WindowError, match=says):
        fit(Module(), 4, checkpoint=path, max_epochs=2)


# Refused.


def of(make=sgd, loss=mse, **more):
    """What makes a module that has these attributes and methods, too."""
    return lambda: type("Module", (Module,), more)(make, loss)


def evaluates_twice(parameters):
    step = {"step": lambda self, closure=None: (closure(), closure())}
    return type("Twice", (torch.optim.SGD,), step)(parameters, lr=0.1)


def of_iterators(self, dataloader_iter):
    return mse(self.network, *next(dataloader_iter)[0])


def with_two_axes(model, x, y):
    return mse(model, x[0], y)


def wrapped(parameters):
    return Optimizer(sgd(parameters), steps=3)


AXES = {"batches": [(torch.ones(2, 4, 5), torch.ones(4, 3))] * 3}
TWICE = {"callbacks": [GradientAccumulationScheduler({0: 2})]}, {"callbacks": [GradientAccumulation(2)]}
REFUSED = [
    (Module, {"accumulate_grad_batches": 2}, ValueError, "accumulate_grad_batches=2. Remove it from the Trainer"),
    (Module, TWICE[0], ValueError, "Remove one of them: GradientAccumulation, GradientAccumulationScheduler"),
    (Module, TWICE[1], RuntimeError, "Found more than one stateful callback of type `GradientAccumulation`"),
    (of(wrapped), {}, ValueError, "Remove the callback, or return the inner optimizer"),
    (of(automatic_optimization=False), {}, ValueError, "=False. Remove the callback, and wrap each optimizer"),
    (of(torch.optim.LBFGS), {}, ValueError, "LBFGS re-evaluates its closure.*TrainStep under manual optimization"),
    (of(evaluates_twice), {}, ValueError, "The closure of a batch was evaluated again"),
    (of(training_step=of_iterators), {}, ValueError, "Define training_step"),
    (of(loss=with_two_axes), AXES, ValueError, r"Pass weight= to GradientAccumulation\(\)"),
    (Module, {"steps": 0}, ValueError, "`steps` must be"),
    (Module, {"steps": 2.5}, TypeError, "`steps` must be"),
    (Module, {"steps": {2: 4}}, ValueError, "`steps` must be"),
    (Module, {"steps": lambda epoch, update: 4}, TypeError, "counts windows from an epoch's first batch"),
    (Module, {"weight": 3}, TypeError, "`weight` must be a callable"),
]


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter` step flavor:UserWarning")
@pytest.mark.parametrize(("make", "keywords", "kind", "message"), REFUSED)
def test_what_accumulates_as_well_or_cannot_be_corrected_is_refused(make, keywords, kind, message):
    with pytest.raises(kind, match=message):
        fit(make(), **keywords)


def test_batch_norm_is_named():
    module = Module()
    module.network = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        fit(module, 4, loader(rows=22))


def test_a_lightning_that_lacks_a_name_is_too_old_or_has_another_strategy_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="a single device and with strategy='ddp'. Received: SingleDeviceStrategy"):
        monkeypatch.setattr("gradaccum.integrations.lightning.trainer.SingleDeviceStrategy", ())
        fit(Module())
    with pytest.raises(
        ValueError, match="lightning 2.*has no fit_loop._should_accumulate.*remove GradientAccumulation"
    ):
        monkeypatch.delattr(lightning.loops.fit_loop._FitLoop, "_should_accumulate")
        fit(Module())
    with pytest.raises(ValueError, match=r"lightning 2\.5\.6 skips schedulers .* Use lightning 2\.6"):
        monkeypatch.setattr(lightning_itself, "__version__", "2.5.6")
        fit(Module())


# The page, and optimizers that are wrapped.


def test_the_pages_examples_run(monkeypatch):
    data = TensorDataset(torch.randn(22, 3), torch.randn(22, 1))
    names = {"__name__": "page", "loader": DataLoader(data, batch_size=2)}
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    monkeypatch.setattr(lightning, "Trainer", functools.partial(lightning.Trainer, **quiet))

    def examples(page):
        for code in re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs" / page).read_text("utf-8"), re.M | re.S):
            exec(code, names)

    examples("lightning.md")
    assert names["trainer"].global_step == names["manual"].global_step == 6
    examples("migrate/lightning.md")
    assert names["trainer"].global_step == 6
