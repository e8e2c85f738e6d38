"""transformers' Trainer is refused at the first step, with advice that can be followed there; its models are exact."""

import math

import pytest
import torch
import transformers
from torch import nn

from gradaccum import NotEquivalentError, WindowError
from gradaccum.torch import TrainStep
from gradaccum.torch.optim import Optimizer
from tests.reference import FLOAT32, FLOAT64, relative_error, torch_updates
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


def train(model, optimizer, folder, trainer=transformers.Trainer, **arguments):
    arguments = {"per_device_train_batch_size": 2, "num_train_epochs": 1, "max_grad_norm": 0} | arguments
    quiet = {"use_cpu": True, "report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    rows = [{"x": x, "labels": y} for x, y in zip(*data())]
    trainer = trainer(
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
    [{}, {"max_grad_norm": 1.0}, {"gradient_accumulation_steps": 2}, {"max_grad_norm": math.inf}, None],
    ids=["no clipping", "clipping", "its own accumulation", "only the norm", "zero_grad that waits for windows"],
)
def test_windows_are_refused_before_anything_has_changed(tmp_path, arguments):
    """Where zero_grad waits, nothing would close an epoch's last window."""
    model = Model()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = Optimizer(sgd(model.parameters()), steps=3)
    if arguments is None:
        arguments, model.zero_grad = {}, optimizer.zero_grad
    with pytest.raises(WindowError, match=r"transformers' Trainer.*MicroBatchTrainer.* without gradient_accum"):
        train(model, optimizer, tmp_path, **arguments)
    assert optimizer.updates == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_windows_of_one_are_the_plain_trainers(tmp_path):
    model = Model()
    train(model, Optimizer(sgd(model.parameters()), steps=1), tmp_path)
    assert error(model, [slice(i, i + 2) for i in range(0, 24, 2)]) <= FLOAT64


# A causal model: what its loss divides by.

WEIGHTS = {"labels": lambda batch: (batch["labels"] != -100).sum()}
WEIGHTS["labels[:, 1:]"] = lambda batch: (batch["labels"][:, 1:] != -100).sum()


def causal():
    torch.manual_seed(1)
    size = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **heads)).double()


def texts():
    torch.manual_seed(0)
    ids = torch.randint(37, (8, 12))
    mask = (torch.arange(12) < torch.tensor([3, 9, 2, 12, 5, 7, 1, 10])[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def causal_error(model):
    """Of the update: llamas compute their loss in float32."""
    start, plain = causal(), causal()
    plain(**texts()).loss.backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    updates = [[b - a for a, b in zip(start.parameters(), m.parameters())] for m in (model, plain)]
    return relative_error(*updates)


@pytest.mark.parametrize("counted", WEIGHTS)
def test_windows_of_a_causal_model_weigh_the_labels_that_are_shifted(counted):
    model, batch = causal(), texts()
    optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), steps=4)
    for start in range(0, 8, 2):
        part = {name: tensor[start : start + 2] for name, tensor in batch.items()}
        optimizer.zero_grad()
        optimizer.backward(model(**part).loss, weight=WEIGHTS[counted](part))
        optimizer.step()
    assert optimizer.updates == 1
    assert (causal_error(model) <= FLOAT32) is (counted == "labels[:, 1:]")


@pytest.mark.parametrize("how", [{"micro_batch_size": 2}, {"max_tokens": 24}], ids=str)
def test_train_step_refuses_a_causal_models_unshifted_weight(how):
    def step(model, counted):
        keywords = {"compute_loss": lambda model, batch: model(**batch).loss, "weight": WEIGHTS[counted]}
        TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), **keywords, **how)(texts())

    with pytest.raises(NotEquivalentError):
        step(causal(), "labels")
    model = causal()
    step(model, "labels[:, 1:]")
    assert causal_error(model) <= FLOAT32
