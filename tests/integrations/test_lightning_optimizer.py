"""Inside Lightning's Trainer and Fabric: what `configure_optimizers` returns makes the large batch's updates."""

import contextlib
import re
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradaccum import WindowError
from gradaccum.torch.optim import Optimizer
from tests.documents import ROOT
from tests.integrations import lightning_problems as problems
from tests.integrations.lightning_problems import MARKS, Scaled, averages, error, fit, loader
from tests.reference import FLOAT64, relative_error, torch_updates
from tests.torch.problems import mse, network, sgd

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its dependencies, about each other
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision as FabricsMixedPrecision
    from lightning.pytorch.callbacks import WeightAveraging

pytestmark = MARKS

SIXES = [slice(0, 6), slice(6, 12), slice(12, 18), slice(18, 24)]
PLUGINS = pytest.mark.parametrize("plugins", [[], [Scaled]], ids=["plain", "GradScaler"])


class Module(problems.Module):
    """Windows of 3."""

    def __init__(self, skipped=(), **options):
        super().__init__(lambda p: Optimizer(sgd(p), **{"steps": 3} | options), skipped=skipped)


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


AUTOMATIC = {  # options, plugins, rows, and the windows that they make
    "plain": ({}, [], 24, SIXES),
    "GradScaler": ({}, [Scaled], 24, SIXES),
    "clipped": ({"clip_grad_norm": 1e-2}, [], 24, SIXES),
    # Under a GradScaler Lightning doesn't call step() then, so the window takes another micro-batch.
    "None first": ({"skipped": [0]}, [], 12, [slice(2, 6), slice(6, 12)]),
    "None in a window": ({"skipped": [4]}, [], 12, [slice(0, 6), [6, 7, 10, 11]]),
    "None last": ({"skipped": [5]}, [], 12, [slice(0, 6), slice(6, 10)]),
    "None first, GradScaler": ({"skipped": [0]}, [Scaled], 14, [slice(2, 8), slice(8, 14)]),
    "None in a window, GradScaler": ({"skipped": [4]}, [Scaled], 14, [slice(0, 6), [6, 7, 10, 11, 12, 13]]),
    "None last, GradScaler": ({"skipped": [5]}, [Scaled], 14, [slice(0, 6), [*range(6, 10), 12, 13]]),
}


@pytest.mark.parametrize("case", AUTOMATIC)
def test_automatic_optimization_makes_the_large_batches_updates(case):
    options, plugins, rows, windows = AUTOMATIC[case]
    module = Module(**options)
    trainer = fit(module, loader(rows=rows), plugins=plugins)
    assert module.optimizers().updates == len(windows)
    assert trainer.global_step == rows // 2, "Lightning counts micro-batches: docs/limits.md"
    assert error(module.network, windows, clip_grad_norm=options.get("clip_grad_norm")) <= FLOAT64


def test_manual_optimization_weighs_ragged_batches_and_closes_the_epochs_last_window():
    module = ByHand()
    fit(module, loader(5), max_epochs=2)
    assert module.optimizers().updates == 4
    assert error(module.network, [slice(0, 15), slice(15, 24)] * 2) <= FLOAT64


@pytest.mark.parametrize(
    ("how", "plugins"), [(Module, []), (Module, [Scaled]), (ByHand, [])], ids=["plain", "GradScaler", "by hand"]
)
def test_a_checkpoint_in_the_middle_of_a_window_goes_on_there(tmp_path, how, plugins):
    """Lightning calls zero_grad() after it has restored."""
    path = tmp_path / "middle.ckpt"
    part = loader(rows=8)  # 4 micro-batches an epoch, windows of 3
    how = type("Open", (how,), {"on_train_epoch_end": lambda self: None})
    module, resumed = how(), how()
    fit(module, part, plugins=plugins).save_checkpoint(path)
    assert module.optimizers().micro_batches == 1
    fit(resumed, part, path, max_epochs=3, plugins=plugins)
    assert resumed.optimizers().updates == 4
    stream = [*range(8)] * 3
    assert error(resumed.network, [stream[i : i + 6] for i in range(0, 24, 6)]) <= FLOAT64


class Scheduled(Module):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_a_scheduler_of_steps_is_warned_of_and_weight_averaging_counts_micro_batches():
    """Both follow updates as the page has it: the last test."""
    with pytest.warns(UserWarning, match="A scheduler steps once per update: `if optimizer.updated"):
        fit(Scheduled())
    assert averages(WeightAveraging, Module()) == 12


# Fabric.


class Plugin(FabricsMixedPrecision):
    """16-bit precision's GradScaler, and float64 all the same."""

    def forward_context(self):
        return contextlib.nullcontext()

    def convert_input(self, data):
        return data


def fabric(scale=None):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0)
    return Fabric(accelerator="cpu", devices=1, plugins=[Plugin("16-mixed", "cpu", scaler=scaler)] if scale else [])


def set_up(fabric):
    model = network()
    return fabric.setup(model, Optimizer(sgd(model.parameters()), steps=3))


def run(fabric, model, optimizer, batches, bad=None, clip=None):
    for index, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        loss = mse(model, x, y)
        fabric.backward(loss * float("inf") if index == bad else loss)
        if clip is not None:
            fabric.clip_gradients(model, optimizer, max_norm=clip)
        optimizer.step()


@pytest.mark.parametrize("scale", [None, 8.0])
def test_set_up_by_fabric_it_makes_the_large_batches_updates_and_its_files_hold_the_open_window(scale, tmp_path):
    one, batches = fabric(scale), list(loader())
    model, optimizer = set_up(one)
    run(one, model, optimizer, batches[:5], bad=None if scale is None else 4)
    one.save(tmp_path / "state", {"model": model, "optimizer": optimizer})
    model, optimizer = set_up(one)
    one.load(tmp_path / "state", {"model": model, "optimizer": optimizer})
    assert optimizer.micro_batches == 2
    run(one, model, optimizer, batches[5:])
    windows = SIXES if scale is None else [SIXES[0], *SIXES[2:]]
    assert optimizer.updates == len(windows)
    assert error(model, windows) <= FLOAT64


# Both.


def lightnings():
    module = ByHand()
    fit(module)
    return module.optimizers(), module.trainer.optimizers[0]


def fabrics():
    _, optimizer = set_up(fabric())
    return optimizer, optimizer.optimizer


@pytest.mark.parametrize("prepared", [lightnings, fabrics])
def test_an_optimizer_that_lightning_has_prepared_passes_on_what_belongs_to_windows(prepared):
    optimizer, inner = prepared()
    added = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [added]})
    assert inner.param_groups[-1]["params"] == [added]
    if prepared is lightnings:
        optimizer.steps = 5
        assert (optimizer.steps, inner.steps, optimizer.updates) == (5, 5, 4)


def around_lightnings():
    module = type("Plain", (ByHand,), {"configure_optimizers": lambda self: sgd(self.parameters())})()
    module.training_step = lambda *_: Optimizer(module.optimizers(), steps=3)
    fit(module)


def around_fabrics():
    model = network()
    Optimizer(fabric().setup(model, sgd(model.parameters()))[1], steps=3)


REFUSED = [
    (lambda: fit(Module(), accumulate_grad_batches=2), ValueError, r"batches=2\) accumulates as well.*Remove it"),
    (lambda: fit(Module(), gradient_clip_val=1e-2), WindowError, "by clipping perhaps.*Pass clip_grad_norm= to the"),
    (lambda: run(f := fabric(), *set_up(f), loader(), clip=1e-2), WindowError, "Pass clip_grad_norm= to the wrapper"),
    (around_lightnings, ValueError, "lightning has prepared .*from configure_optimizers"),
    (around_fabrics, ValueError, r"lightning has prepared .*Wrap first, then prepare: fabric.setup\(model, "),
]


@pytest.mark.parametrize(("program", "kind", "says"), REFUSED)
def test_what_would_clip_sums_or_count_twice_is_refused(program, kind, says):
    with pytest.raises(kind, match=says):
        program()


@PLUGINS
def test_the_pages_module_averages_schedules_and_closes_windows_by_updates(plugins):
    page = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names, averaged = {"__name__": "page"}, []
    exec(code, names)
    module, alone = names["Module"](), nn.Linear(3, 1)
    alone.load_state_dict(module.network.state_dict())

    def average(mean, new, number):
        averaged.append(int(number))
        return new

    x, y = torch.randn(20, 3), torch.randn(20, 1)
    fit(module, DataLoader(TensorDataset(x, y), 2), callbacks=[names["Averaging"](avg_fn=average)], plugins=plugins)
    inner = torch.optim.Adam(alone.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, 100)
    windows = [(x[:8], y[:8]), (x[8:16], y[8:16]), (x[16:], y[16:])]  # 4 + 4 + 2 micro-batches
    torch_updates(alone, inner, windows, mse, clip_grad_norm=1.0, after_update=schedule.step)
    assert module.optimizers().updates == module.lr_schedulers().last_epoch == 3
    assert averaged == [1, 1, 2, 2]  # weight and bias; the first update is copied
    assert relative_error(module.network.parameters(), alone.parameters()) <= FLOAT64
