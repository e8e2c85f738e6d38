"""Inside transformers' Trainer: refused at the first step, with advice that can be followed there."""

import math

import pytest
import torch
import transformers
from torch import nn

from gradaccum import WindowError
from gradaccum.torch import TrainStep
from gradaccum.torch.optim import Optimizer
from tests.reference import FLOAT64, relative_error, torch_updates
from tests.torch.problems import mse, network, regression, sgd

pytestmark = pytest.mark.usefixtures("float64")


class Model(nn.Module):
    """As the Trainer wants it: a loss among the outputs."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.network(x), labels)}


def data():
    return tuple(t.double() for t in regression(24))


def train(model, optimizer, folder, **arguments):
    arguments = {"per_device_train_batch_size": 2, "num_train_epochs": 1, "max_grad_norm": 0} | arguments
    quiet = {"use_cpu": True, "report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    rows = [{"x": x, "labels": y} for x, y in zip(*data())]
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(str(folder), **quiet, **arguments),
        train_dataset=rows,
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
    )
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
    trainer.train()
    return trainer


def error(model, windows):
    plain = network()
    torch_updates(plain, sgd(plain.parameters()), [tuple(t[w] for t in data()) for w in windows], mse)
    return relative_error(model.network.parameters(), plain.parameters())


@pytest.mark.parametrize(
    "arguments",
    [{}, {"max_grad_norm": 1.0}, {"gradient_accumulation_steps": 2}, {"max_grad_norm": math.inf}],
    ids=["no clipping", "clipping", "its own accumulation", "only the norm"],
)
def test_windows_are_refused_before_anything_has_changed(tmp_path, arguments):
    model = Model()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = Optimizer(sgd(model.parameters()), steps=3)
    with pytest.raises(WindowError, match=r"transformers' Trainer.*gradient_accumulation_steps.*TrainStep"):
        train(model, optimizer, tmp_path, **arguments)
    assert optimizer.updates == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_windows_of_one_are_the_plain_trainers(tmp_path):
    model = Model()
    train(model, Optimizer(sgd(model.parameters()), steps=1), tmp_path)
    assert error(model, [slice(i, i + 2) for i in range(0, 24, 2)]) <= FLOAT64


def test_the_advice_to_let_the_trainer_accumulate_gives_the_large_batch(tmp_path):
    model = Model()
    train(model, sgd(model.parameters()), tmp_path, gradient_accumulation_steps=3)
    assert error(model, [slice(i, i + 6) for i in range(0, 24, 6)]) <= FLOAT64


def test_the_advice_to_use_train_step_in_a_loop_gives_the_large_batch():
    model = Model()

    def compute_loss(model, batch):
        return model(**batch)["loss"]

    step = TrainStep(model, sgd(model.parameters()), compute_loss=compute_loss, micro_batch_size=2)
    x, y = data()
    for start in range(0, 24, 6):
        step({"x": x[start : start + 6], "labels": y[start : start + 6]})
    assert error(model, [slice(i, i + 6) for i in range(0, 24, 6)]) <= FLOAT64
