"""`GradientAccumulation` under Lightning's Trainer: each window's update is that of its rows as one batch."""

import functools
import re
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradaccum import WindowError
from gradaccum.torch import TrainStep
from gradaccum.torch.optim import Optimizer
from tests.documents import ROOT
from tests.integrations.lightning_problems import MARKS, GradientAccumulation, SaveAt, Scaled, lightning, quiet_trainer
from tests.reference import FLOAT32, FLOAT64, relative_error, torch_updates
from tests.torch.problems import adam, classes, mse, network, regression, sgd

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its dependencies, about each other
    import lightning as lightning_itself
    from lightning.pytorch.callbacks import (
        EarlyStopping,
        GradientAccumulationScheduler,
        ModelCheckpoint,
        StochasticWeightAveraging,
        TQDMProgressBar,
        WeightAveraging,
    )

pytestmark = MARKS

ROWS = 23
BATCHES = [slice(i, min(i + 2, ROWS)) for i in range(0, ROWS, 2)]  # 11 of 2 rows and one of 1


def data(dtype=None):
    return tuple(t.to(dtype or torch.get_default_dtype()) for t in regression(ROWS))


def loader(batch_size=2, rows=ROWS, kind=DataLoader):
    return kind(TensorDataset(*(t[:rows] for t in data())), batch_size=batch_size)


def windows(steps, batches=None, count=None):
    """The rows of each window of an epoch."""
    batches = BATCHES[:count] if batches is None else batches
    return [
        slice(batches[i].start, batches[min(i + steps, len(batches)) - 1].stop) for i in range(0, len(batches), steps)
    ]


class Module(lightning.LightningModule):
    def __init__(self, make=sgd, loss=mse, skipped=()):
        super().__init__()
        self.network, self.make, self.loss, self.skipped = network(), make, loss, skipped

    def configure_optimizers(self):
        return self.make(self.network.parameters())

    def training_step(self, batch, index):
        return None if index in self.skipped else self.loss(self.network, *batch)


def trainer(callbacks=(), **keywords):
    saves = any(isinstance(c, ModelCheckpoint) for c in callbacks)
    return quiet_trainer(callbacks=[*callbacks], enable_checkpointing=saves, **keywords)


def fit(module, steps=4, batches=None, checkpoint=None, callbacks=(), weight=None, validation=None, **keywords):
    one = trainer([*callbacks, GradientAccumulation(steps, weight=weight)], **keywords)
    one.fit(module, loader() if batches is None else batches, validation, ckpt_path=checkpoint, weights_only=False)
    return one


def error(module, large, make=sgd, loss=mse, rows=None, **keywords):
    model, rows = network(), rows or data()
    torch_updates(model, make(model.parameters()), [tuple(t[w] for t in rows) for w in large], loss, **keywords)
    return relative_error(module.network.parameters(), model.parameters())


# Windows.


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


class StopAt(lightning.Callback):
    def __init__(self, index):
        self.index = index

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        trainer.should_stop = index == self.index


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
    "one window for all": {"steps": 100, "make": adam, "max_epochs": 2, "large": windows(100) * 2},
    "weights": labelled(ROWS, 0, 5) | {"large": [slice(0, 20), slice(20, ROWS)]},
    **{
        f"a loss of NaN that weighs 0, batch {batch}": labelled(12, 9, 2, [2 * batch, 2 * batch + 1])
        | {"large": [slice(0, 8), slice(8, 12)]}
        for batch in (0, 3, 5)
    },
    **{f"None for batch {batch}": {"skipped": [batch], "large": without(batch)} for batch in (0, 2, 3, 11)},
    "None for an epoch's only batch of a window": {"steps": 11, "skipped": [11], "large": [slice(0, 22)], "updates": 2},
    "limit_train_batches of a half": {"limit_train_batches": 0.5, "large": windows(4, count=6)},
    "overfit_batches": {"overfit_batches": 3, "max_epochs": 2, "large": windows(4, count=3) * 2},
    "fast_dev_run": {"fast_dev_run": 3, "large": windows(4, count=3)},
    "GradScaler, clipped and stopped": {
        "steps": 5, "plugins": [Scaled], "callbacks": [StopAt(7)], "gradient_clip_val": 0.05,
        "large": windows(5, count=8), "clip_grad_norm": 0.05,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_windows_make_the_large_batches_updates(case):
    options = {"make": sgd, "loss": mse, "rows": None, "clip_grad_norm": None} | CASES[case]
    expected = {name: options.pop(name) for name in ("large", "make", "loss", "rows", "clip_grad_norm")}
    module = Module(expected["make"], expected["loss"], options.pop("skipped", ()))
    updates, batches = options.pop("updates", len(expected["large"])), options.pop("batches", loader)
    options["plugins"] = [make() for make in options.get("plugins", [])]
    one = fit(module, options.pop("steps", 4), batches(), **options)
    assert one.global_step == updates
    assert error(module, **expected) <= FLOAT64
    assert one.accumulate_grad_batches == 1, "as it was"


def test_lightnings_own_accumulation_differs():
    """Or the test above would show nothing."""
    module = Module()
    trainer(accumulate_grad_batches=5).fit(module, loader())
    assert error(module, windows(5)) > 1e-3


def test_in_float32_as_well():
    torch.set_default_dtype(torch.float32)
    module = Module()
    fit(module, 5, max_epochs=2)
    assert error(module, windows(5) * 2) <= FLOAT32


class Bar(TQDMProgressBar):
    """Notes where its bar has come to after each batch, and how far training has come by then."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, trainer, *rest):
        super().on_train_batch_end(trainer, *rest)
        bar = self.train_progress_bar
        self.seen.append((bar.n, bar.total, trainer.global_step))


def test_the_progress_bar_counts_batches_and_global_step_updates():
    bar = Bar()
    fit(Module(), 4, callbacks=[bar], enable_progress_bar=True)
    count = len(BATCHES)
    assert [entry[:2] for entry in bar.seen] == [(n, count) for n in range(1, count + 1)]
    assert [updates for _, _, updates in bar.seen] == [(n + 3 * (n == count)) // 4 for n in range(1, count + 1)]


def test_a_window_that_weighs_nothing_makes_no_update(caplog):
    module = Module()
    before = [p.detach().clone() for p in module.network.parameters()]
    fit(module, 6, loader(rows=12), weight=lambda batch: 0)
    assert relative_error(module.network.parameters(), before) == 0
    assert "No update: the total weight of this window's 6 micro-batches is 0" in caplog.text


# Where training stops inside a window.


class Scheduled(Module):
    interval, frequency, ends = "step", 1, None

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval, "frequency": self.frequency}]


class Ending(Scheduled):
    def on_train_batch_start(self, batch, index):
        return -1 if index == 6 else None


@pytest.mark.parametrize(
    ("cls", "interval", "steps", "epochs", "stop", "batches"),
    [
        (Scheduled, "step", 4, 1, 5, 6),  # stopped inside a window
        (Ending, "step", 4, 2, None, 6),  # ended by the module inside a window
        (Ending, "epoch", 4, 2, None, 6),
    ],
)
def test_schedulers_step_once_per_update_or_after_an_epochs_last_one(cls, interval, steps, epochs, stop, batches):
    module = type(interval, (cls,), {"interval": interval})()
    one = fit(module, steps, max_epochs=epochs, callbacks=[] if stop is None else [StopAt(stop)])
    model, large = network(), windows(steps, count=batches)
    inner = sgd(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    for _ in range(epochs):
        after = schedule.step if interval == "step" else None
        torch_updates(model, inner, [tuple(t[w] for t in data()) for w in large], mse, after_update=after)
        if interval == "epoch":
            schedule.step()
    assert one.global_step == epochs * len(large)
    assert relative_error(module.network.parameters(), model.parameters()) <= FLOAT64
    assert module.lr_schedulers().last_epoch == schedule.last_epoch
    assert "on_train_batch_start" not in vars(module)


def test_a_hook_that_the_user_has_put_on_one_module_ends_epochs_and_is_put_back():
    """It was deleted from the module when training ended."""
    module, asked = Module(), []

    def hook(batch, index):
        asked.append(index)
        return -1 if index == 6 else None

    module.on_train_batch_start = hook
    fit(module, 4, max_epochs=2)
    assert module.on_train_batch_start is hook
    assert asked == [*range(7)] * 2
    assert error(module, windows(4, count=6) * 2) <= FLOAT64


def test_early_stopping_stops_between_updates_that_are_exact():
    class Validated(Module):
        def validation_step(self, batch, index):
            self.log("quality", float(self.trainer.global_step))

    module = Validated()
    stopping = EarlyStopping("quality", patience=1, mode="min")
    one = fit(
        module, 5, callbacks=[stopping], validation=loader(rows=2), val_check_interval=3, num_sanity_val_steps=0,
        max_epochs=3,
    )  # fmt: skip
    assert one.global_step == 2  # validated after 3 batches, and after 6: inside a window
    assert error(module, windows(5, count=6)) <= FLOAT64


def test_an_error_inside_a_window_leaves_a_line(caplog):
    class Failing(Module):
        def training_step(self, batch, index):
            if index == 5:
                raise OSError("lost")
            return super().training_step(batch, index)

    with pytest.raises(OSError, match="lost"):
        fit(Failing(), 4)
    assert "Training has ended inside an open window of 1 micro-batches, which has made no update" in caplog.text


def test_a_trainer_whose_training_has_failed_can_be_used_again():
    module, accumulation = Module(), GradientAccumulation(5)
    one = trainer([accumulation])
    with pytest.raises(TypeError):
        one.fit(module, [(None, torch.ones(2))] * 2)
    one.fit(module, loader())
    assert error(module, windows(5)) <= FLOAT64


def test_weight_averaging_averages_once_per_update():
    count = []

    def average(mean, new, number):
        count.append(int(number))
        return new

    callback = WeightAveraging(avg_fn=average)
    callback.on_train_epoch_end = callback.on_train_end = lambda *_: None  # they would average, and swap
    fit(Module(), 5, callbacks=[callback])
    assert len(count) / len([*network().parameters()]) == 2, "the first of three is a copy"


@pytest.mark.filterwarnings("ignore:.*in eval mode:UserWarning")
@pytest.mark.parametrize("accumulation_first", [True, False])
def test_stochastic_weight_averaging_averages_exact_epochs(accumulation_first):
    """With its pass over the data for BatchNorm, in which nothing is updated."""

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))

    def epochs(steps, batches):
        module = Module()
        module.network = make()
        module.network[1].eval().requires_grad_(False)
        averaging = StochasticWeightAveraging(0.1, swa_epoch_start=1)
        callbacks = [GradientAccumulation(steps), averaging]
        one = trainer(callbacks if accumulation_first else callbacks[::-1], max_epochs=3)
        one.fit(module, batches)
        return module.network

    plain, windowed = epochs(1, loader(10)), epochs(5, loader(2))
    assert relative_error(windowed.parameters(), plain.parameters()) <= FLOAT64


def test_estimated_stepping_batches_are_the_updates(tmp_path):
    found = []

    class Asking(Module):
        def configure_optimizers(self):
            found.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    assert fit(Asking(), 5, max_epochs=2).global_step == found[0] == 6
    with pytest.raises(ValueError, match="Count the updates of each epoch yourself"):
        fit(Asking(), {0: 5, 1: 2}, max_epochs=2)


# Precision.


def test_an_overflow_costs_one_window_and_halves_the_scale_once():
    def loss(model, x, y):
        return mse(model, x, y) * (float("inf") if torch.equal(x[0], data()[0][4]) else 1)

    module, plugin = Module(loss=loss), Scaled()
    fit(module, 5, plugins=[plugin])
    assert plugin.scaler.get_scale() == 4
    assert error(module, windows(5)[1:]) <= FLOAT64


def test_under_a_gradscaler_none_for_a_windows_last_batch_discards_it_by_name(caplog):
    """Lightning makes no step then."""
    module = Module(skipped=[4])
    fit(module, 5, plugins=[Scaled()])
    assert "Discarding an open window of 4 micro-batches: its last batch was None, or training_step" in caplog.text
    assert error(module, windows(5)[1:]) <= FLOAT64


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


class Resumable(DataLoader):
    """Goes on where it was, as torchdata's StatefulDataLoader."""

    start = 0

    def __iter__(self):
        batches, self.start = [*super().__iter__()][self.start :], 0
        return iter(batches)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        self.start = state["batch"]


@pytest.mark.parametrize(("index", "plugins"), [(5, []), (4, [Scaled]), (7, [Scaled])], ids=str)
def test_resumed_inside_a_window_training_is_the_same_bit_for_bit(tmp_path, index, plugins):
    path = tmp_path / "middle.ckpt"
    whole = Module(adam)
    steps = {0: 3, 1: 5}
    fit(whole, steps, max_epochs=3, callbacks=[SaveAt(index, path)], plugins=[make() for make in plugins])
    resumed, batches = Module(adam), Resumable(TensorDataset(*data()), batch_size=2)
    batches.load_state_dict({"batch": index + 1})
    one = fit(resumed, steps, batches, path, max_epochs=3, plugins=[make() for make in plugins])
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
    fit(Module(), 5, max_epochs=2, callbacks=[SaveAt(5, path)])
    with pytest.raises(
        WindowError, match=r"inside a window of 5 steps \(1 of them done\).*steps=4 there. Resume with 5"
    ):
        fit(Module(), 4, Resumable(TensorDataset(*data()), batch_size=2), path, max_epochs=2)


# Refused.


def LBFGS():
    return Module(torch.optim.LBFGS)


class Twice(torch.optim.SGD):
    def step(self, closure=None):
        closure()
        closure()


class Fetching(Module):
    def training_step(self, dataloader_iter):
        batch, *_ = next(dataloader_iter)
        return mse(self.network, *batch)


class Clipping(Module):
    def on_after_backward(self):
        nn.utils.clip_grad_norm_(self.network.parameters(), 1e-3)


class Manual(Module):
    automatic_optimization = False


REFUSED = [
    (Module, {"accumulate_grad_batches": 2}, ValueError, "accumulate_grad_batches=2. Remove it from the Trainer"),
    (
        Module, {"callbacks": [GradientAccumulationScheduler({0: 2})]}, ValueError,
        "Remove one of them: GradientAccumulation, GradientAccumulationScheduler",
    ),
    (
        Module, {"callbacks": [GradientAccumulation(2)]}, RuntimeError,
        "Found more than one stateful callback of type `GradientAccumulation`",
    ),
    (
        lambda: Module(lambda parameters: Optimizer(sgd(parameters), steps=3)), {}, ValueError,
        "Remove the callback, or return the inner optimizer",
    ),
    (Manual, {}, ValueError, "automatic_optimization=False. Remove the callback, and wrap each optimizer"),
    (LBFGS, {}, ValueError, "LBFGS re-evaluates its closure.*TrainStep under manual optimization"),
    (
        lambda: Module(lambda parameters: Twice(parameters, lr=0.1)), {}, ValueError,
        "The closure of a batch was evaluated again",
    ),
    (Fetching, {}, ValueError, "Define training_step"),
    (Clipping, {}, WindowError, "edited inside an open window.*gradient_clip_val"),
    (
        lambda: Module(loss=lambda model, x, y: mse(model, x[0], y)),
        {"batches": [(torch.ones(2, 4, 5), torch.ones(4, 3))] * 3}, ValueError,
        r"Pass weight= to GradientAccumulation\(\)",
    ),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter` step flavor:UserWarning")
@pytest.mark.parametrize(("make", "keywords", "kind", "message"), REFUSED)
def test_what_accumulates_as_well_or_cannot_be_corrected_is_refused(make, keywords, kind, message):
    with pytest.raises(kind, match=message):
        fit(make(), **keywords)


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "4", {}, {2: 4}])
def test_steps_are_checked(steps):
    with pytest.raises((TypeError, ValueError), match="`steps` must be"):
        GradientAccumulation(steps)


def test_a_callable_schedule_and_a_weight_that_is_none_are_refused():
    with pytest.raises(TypeError, match="counts windows from an epoch's first batch"):
        GradientAccumulation(lambda epoch, update: 4)
    with pytest.raises(TypeError, match="`weight` must be a callable"):
        GradientAccumulation(4, weight=3)


def test_batch_norm_is_named():
    module = Module()
    module.network = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        fit(module, 4, loader(rows=22))


def test_a_lightning_that_lacks_a_name_is_refused(monkeypatch):
    from lightning.pytorch.loops.fit_loop import _FitLoop

    monkeypatch.delattr(_FitLoop, "_should_accumulate")
    with pytest.raises(
        ValueError, match=r"lightning 2.*has no fit_loop._should_accumulate.*remove GradientAccumulation"
    ):
        fit(Module())


def test_a_lightning_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(lightning_itself, "__version__", "2.5.6")
    with pytest.raises(ValueError, match=r"lightning 2\.5\.6 skips schedulers .* Use lightning 2\.6"):
        fit(Module())


def test_strategies_that_it_does_not_know_are_refused(monkeypatch):
    monkeypatch.setattr("gradaccum.integrations.lightning.trainer.SingleDeviceStrategy", ())
    with pytest.raises(ValueError, match=r"a single device and with strategy='ddp'. Received: SingleDeviceStrategy"):
        fit(Module())


# The page, and optimizers that are wrapped.


def test_the_pages_examples_run(monkeypatch):
    data = TensorDataset(torch.randn(22, 3), torch.randn(22, 1))
    names = {"__name__": "page", "rows": data, "loader": DataLoader(data, batch_size=2)}
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    monkeypatch.setattr(lightning, "Trainer", functools.partial(lightning.Trainer, **quiet))

    def examples(page):
        for code in re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs" / page).read_text("utf-8"), re.M | re.S):
            exec(code, names)

    examples("lightning.md")
    assert names["trainer"].global_step == names["manual"].global_step == 6
    examples("migrate/lightning.md")
    assert names["trainer"].global_step == 6


def test_train_step_under_manual_optimization_makes_the_large_batches_updates():
    class Manual(Module):
        automatic_optimization = False

        def on_fit_start(self):
            self.train_step = TrainStep(self.network, self.optimizers(), loss_fn=nn.MSELoss(), micro_batch_size=2)

        def training_step(self, batch, index):
            self.train_step(*batch)

    module = Manual()
    one = trainer()
    one.fit(module, loader(10))
    assert one.global_step == 3
    assert error(module, windows(5)) <= FLOAT64


def test_two_wrapped_optimizers_under_manual_optimization_make_the_large_batches_updates():
    """A network that is trained against another, as in a GAN."""

    def losses(one, other, x, y):
        return mse(one, x, y), nn.functional.mse_loss(other(x), one(x).detach())

    class Two(lightning.LightningModule):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.one, self.other = network(0), network(1)

        def configure_optimizers(self):
            return Optimizer(sgd(self.one.parameters()), steps=5), Optimizer(sgd(self.other.parameters()), steps=3)

        def training_step(self, batch, index):
            for optimizer, loss in zip(self.optimizers(), losses(self.one, self.other, *batch), strict=True):
                optimizer.zero_grad()
                optimizer.backward(loss, weight=len(batch[0]))
            for optimizer in self.optimizers():
                optimizer.step()

        def on_train_epoch_end(self):
            for optimizer in self.optimizers():
                optimizer.flush()

    module, one, other = Two(), network(0), network(1)
    trainer().fit(module, loader())
    first, second = sgd(one.parameters()), sgd(other.parameters())
    gradients = {0: [], 1: []}
    for index, rows in enumerate(BATCHES):
        batch = tuple(t[rows] for t in data())
        for which, (model, loss) in enumerate(zip((one, other), losses(one, other, *batch), strict=True)):
            found = torch.autograd.grad(loss * len(batch[0]), [*model.parameters()])
            gradients[which].append((len(batch[0]), found))
        for which, (model, optimizer, steps) in enumerate([(one, first, 5), (other, second, 3)]):
            if len(gradients[which]) == steps or index == len(BATCHES) - 1:
                total = sum(weight for weight, _ in gradients[which])
                for parameter, *parts in zip(model.parameters(), *(g for _, g in gradients[which]), strict=True):
                    parameter.grad = sum(parts) / total
                optimizer.step()
                gradients[which] = []
    assert relative_error(module.one.parameters(), one.parameters()) <= FLOAT64
    assert relative_error(module.other.parameters(), other.parameters()) <= FLOAT64
