"""Inside Lightning's Trainer and Fabric: what `configure_optimizers` returns makes the large batch's updates."""

import contextlib
import functools
import re
import types
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradaccum import WindowError
from gradaccum.torch.optim import Optimizer
from tests.documents import ROOT
from tests.integrations import lightning_problems
from tests.integrations.lightning_problems import MARKS, Scaled, data, loader, quiet_trainer
from tests.integrations.lightning_problems import Module as Plain
from tests.reference import FLOAT64, relative_error, torch_updates
from tests.torch.problems import mse, network, sgd

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its dependencies, about each other
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision as FabricsMixedPrecision
    from lightning.pytorch.callbacks import WeightAveraging

pytestmark = MARKS

SIXES = [slice(0, 6), slice(6, 12), slice(12, 18), slice(18, 24)]


data, loader = functools.partial(data, 24), functools.partial(loader, of=24)


class Module(Plain):
    def __init__(self, skipped=(), **options):
        super().__init__(lambda parameters: Optimizer(sgd(parameters), **{"steps": 3} | options), skipped=skipped)


class ByHand(Module):
    """Manual optimization: weights for ragged batches, and an end of the epoch."""

    automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        optimizer.backward(mse(self.network, *batch), weight=len(batch[0]))
        optimizer.step()

    def on_train_epoch_end(self):
        self.optimizers().flush()


def fit(module, batches, checkpoint=None, **keywords):
    trainer = quiet_trainer(**keywords)
    trainer.fit(module, batches, ckpt_path=checkpoint)
    return trainer


def error(module, windows, **keywords):
    return lightning_problems.error(module, windows, rows=data(), **keywords)


@pytest.mark.parametrize("plugins", [[], [Scaled]], ids=["plain", "GradScaler"])
def test_automatic_optimization_makes_the_large_batches_updates(plugins):
    module = Module()
    trainer = fit(module, loader(), plugins=[make() for make in plugins])
    assert module.optimizers().updates == 4
    assert trainer.global_step == 12, "Lightning counts micro-batches: docs/limits.md"
    assert error(module, SIXES) <= FLOAT64


@pytest.mark.parametrize("plugins", [[], [Scaled]], ids=["plain", "GradScaler"])
@pytest.mark.parametrize("skipped", [0, 4, 5])
def test_a_training_step_that_returns_none_leaves_its_rows_out(skipped, plugins):
    """Under a GradScaler Lightning doesn't call step() then, so the window takes another micro-batch."""
    module = Module(skipped=[skipped])
    fit(module, loader(rows=12 if not plugins else 14), plugins=[make() for make in plugins])
    rows = [row for row in range(14) if row // 2 != skipped]
    first = 4 if skipped == 0 and not plugins else 6
    windows = [rows[:first], rows[first:10] if not plugins else rows[6:12]]
    assert error(module, windows) <= FLOAT64
    assert module.optimizers().updates == 2


def test_manual_optimization_weighs_ragged_batches_and_closes_the_epochs_last_window():
    module = ByHand()
    fit(module, loader(5), max_epochs=2)
    assert module.optimizers().updates == 4
    assert error(module, [slice(0, 15), slice(15, 24)] * 2) <= FLOAT64


def test_lightnings_own_accumulation_is_refused():
    with pytest.raises(ValueError, match=r"Trainer\(accumulate_grad_batches=2\) accumulates as well.*Remove it"):
        fit(Module(), loader(), accumulate_grad_batches=2)


def test_gradient_clip_val_is_refused_with_what_to_use():
    with pytest.raises(WindowError, match=r"by clipping perhaps.*Pass clip_grad_norm= to the wrapper"):
        fit(Module(), loader(), gradient_clip_val=1e-2)


@pytest.mark.parametrize("nonfinite", ["propagate", "skip_micro_batch"])
@pytest.mark.parametrize(
    ("how", "plugins"), [(Module, []), (Module, [Scaled]), (ByHand, [])], ids=["plain", "GradScaler", "by hand"]
)
def test_a_checkpoint_in_the_middle_of_a_window_goes_on_there(tmp_path, how, plugins, nonfinite):
    """Lightning calls zero_grad() after it has restored."""
    path = tmp_path / "middle.ckpt"
    part = loader(rows=8)  # 4 micro-batches an epoch, windows of 3
    how = type("Open", (how,), {"on_train_epoch_end": lambda self: None})
    module = how(nonfinite=nonfinite)
    fit(module, part, plugins=[make() for make in plugins]).save_checkpoint(path)
    assert module.optimizers().micro_batches == 1
    resumed = how(nonfinite=nonfinite)
    fit(resumed, part, path, max_epochs=3, plugins=[make() for make in plugins])
    assert resumed.optimizers().updates == 4
    stream = [*range(8)] * 3
    assert error(resumed, [stream[i : i + 6] for i in range(0, 24, 6)]) <= FLOAT64


class Scheduled(Module):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_a_scheduler_of_steps_is_warned_of():
    with pytest.warns(UserWarning, match="A scheduler steps once per update: `if optimizer.updated"):
        fit(Scheduled(), loader())


def test_weight_averaging_that_is_not_told_counts_micro_batches():
    averaged = []
    callback = WeightAveraging(avg_fn=lambda mean, new, number: averaged.append(int(number)) or new)
    callback.on_train_epoch_end = callback.on_train_end = lambda *_: None  # they would average, and swap
    fit(Module(), loader(), callbacks=[callback])
    assert len(averaged) / len([*network().parameters()]) == 12 - 1, "the first is a copy"


def test_lightnings_optimizer_passes_on_what_belongs_to_windows():
    module = ByHand()
    fit(module, loader())
    optimizer = module.optimizers()
    added = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [added]})
    optimizer.steps = 5
    inner = module.trainer.optimizers[0]
    assert inner.param_groups[-1]["params"] == [added]
    assert (optimizer.steps, inner.steps, optimizer.updates) == (5, 5, 4)


def test_wrapped_around_lightnings_optimizer_it_is_refused():
    module = type("Plain", (ByHand,), {"configure_optimizers": lambda self: sgd(self.parameters())})()
    module.training_step = lambda *_: Optimizer(module.optimizers(), steps=3)
    with pytest.raises(ValueError, match=r"lightning has prepared .*from configure_optimizers"):
        fit(module, loader())


# Fabric.


def fabric(scale=None):
    plugins = []
    if scale is not None:

        class Plugin(FabricsMixedPrecision):
            def forward_context(self):
                return contextlib.nullcontext()

            def convert_input(self, data):
                return data

        plugins = [Plugin("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale))]
    return Fabric(accelerator="cpu", devices=1, plugins=plugins)


def fabrics(model):
    return types.SimpleNamespace(network=model)


def set_up(fabric, **options):
    model = network()
    return fabric.setup(model, Optimizer(sgd(model.parameters()), **{"steps": 3} | options))


def run(fabric, model, optimizer, batches, bad=None, clip=None):
    for index, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        loss = mse(model, x, y)
        fabric.backward(loss * float("inf") if index == bad else loss)
        if clip is not None:
            fabric.clip_gradients(model, optimizer, max_norm=clip)
        optimizer.step()


@pytest.mark.parametrize("scale", [None, 8.0])
def test_set_up_by_fabric_it_makes_the_large_batches_updates(scale):
    one = fabric(scale)
    model, optimizer = set_up(one)
    run(one, model, optimizer, loader(), bad=None if scale is None else 4)
    windows = SIXES if scale is None else [SIXES[0], *SIXES[2:]]
    assert optimizer.updates == len(windows)
    assert error(fabrics(model), windows) <= FLOAT64


def test_a_file_of_fabrics_holds_the_open_window(tmp_path):
    one = fabric()
    model, optimizer = set_up(one)
    batches = list(loader())
    run(one, model, optimizer, batches[:5])
    one.save(tmp_path / "state", {"model": model, "optimizer": optimizer})
    model, optimizer = set_up(one)
    one.load(tmp_path / "state", {"model": model, "optimizer": optimizer})
    assert optimizer.micro_batches == 2
    run(one, model, optimizer, batches[5:])
    assert error(fabrics(model), SIXES) <= FLOAT64


def test_fabrics_clipping_is_refused():
    one = fabric()
    with pytest.raises(WindowError, match=r"Pass clip_grad_norm= to the wrapper"):
        run(one, *set_up(one), loader(), clip=1e-2)


def test_wrapped_around_fabrics_optimizer_it_is_refused():
    model = network()
    _, optimizer = fabric().setup(model, sgd(model.parameters()))
    with pytest.raises(ValueError, match=r"lightning has prepared .*Wrap first, then prepare: fabric.setup\(model, "):
        Optimizer(optimizer, steps=3)


def test_fabrics_optimizer_passes_on_what_belongs_to_windows():
    _, optimizer = set_up(fabric())
    added = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [added]})
    assert optimizer.optimizer.param_groups[-1]["params"] == [added]


@pytest.mark.parametrize("plugins", [[], [Scaled]], ids=["plain", "GradScaler"])
def test_the_pages_module_averages_schedules_and_closes_windows_by_updates(plugins):
    page = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names = {"__name__": "page"}
    exec(code, names)
    module, averaged = names["Module"](), []
    alone = torch.nn.Linear(3, 1)
    alone.load_state_dict(module.network.state_dict())

    def average(mean, new, number):
        averaged.append(int(number))
        return new

    x, y = torch.randn(20, 3), torch.randn(20, 1)
    callback = names["Averaging"](avg_fn=average)
    rows = DataLoader(TensorDataset(x, y), batch_size=2)
    fit(module, rows, callbacks=[callback], plugins=[make() for make in plugins])
    inner = torch.optim.Adam(alone.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, 100)
    windows = [(x[:8], y[:8]), (x[8:16], y[8:16]), (x[16:], y[16:])]  # 4 + 4 + 2 micro-batches
    torch_updates(alone, inner, windows, mse, clip_grad_norm=1.0, after_update=schedule.step)
    assert module.optimizers().updates == module.lr_schedulers().last_epoch == 3
    assert averaged == [1, 1, 2, 2]  # weight and bias; the first update is copied
    assert relative_error(module.network.parameters(), alone.parameters()) <= FLOAT64
