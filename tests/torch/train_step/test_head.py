"""Huge vocabularies: the head and the loss in tiles make the update of the logits that never exist."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum.torch.head import tiling
from gradaccum.torch.measure.fake_memory import LiveBytes
from tests.reference import FLOAT32, relative_error
from tests.torch.train_step.problems import plain_loss
from tests.torch.train_step.steps import assert_same_updates, step_of
from tests.torch.train_step.test_padding import data, output_loss, packed

CLASSES = 23
AT_ONCE = "computed at once"


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Of three rows."""
    monkeypatch.setattr("gradaccum.torch.head.NUMBERS", 3 * CLASSES)


class Model(nn.Module):
    """Tokens, a layer, and a head over classes."""

    def __init__(self, bias=True, dtype=torch.float64, trained=True):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, 6, dtype=dtype)
        self.head = nn.Linear(6, CLASSES, bias=bias, dtype=dtype).requires_grad_(trained)

    def forward(self, x):
        return self.head(torch.tanh(self.embedding(x)))


class Second(Model):
    def forward(self, x):
        return super().forward(x).transpose(1, 2)


def tokens(rows=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(CLASSES, (rows, 5), generator=generator) for _ in range(2))
    return x, y.masked_fill(torch.rand(y.shape, generator=generator) < 0.2, -100)


def flat(m, x, y, **keywords):
    return F.cross_entropy(m(x).flatten(0, 1), y.flatten(), **keywords)


def valid(x, y):
    return (y != -100).sum()


WEIGHTS = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)
LOSSES = {
    "flat": (lambda m, x, y: F.cross_entropy(m(x).view(-1, CLASSES), y.flatten()), valid),
    "transposed": (lambda m, x, y: F.cross_entropy(m(x).transpose(1, 2), y), valid),
    "next token": (
        lambda m, x, y: F.cross_entropy(m(x)[:, :-1].contiguous().double().reshape(-1, CLASSES), y[:, 1:].flatten()),
        lambda x, y: valid(x, y[:, 1:]),
    ),
    "one of each row": (lambda m, x, y: F.cross_entropy(m(x)[..., 2:3, :].flatten(0, 1), y[:, 2].clamp(0)), None),
    "weighted, smooth": (
        lambda m, x, y: flat(m, x, y, weight=WEIGHTS, label_smoothing=0.1), lambda x, y: WEIGHTS[y[y != -100]].sum()
    ),
    "sum": (lambda m, x, y: flat(m, x, y, reduction="sum") / len(x), None),
    "none": (lambda m, x, y: F.cross_entropy(m(x).mT, y, reduction="none").square().sum(1).mean(), None),
}  # fmt: skip
TILED = {
    **{name: (Model, {"loss": loss, "weight": weight}) for name, (loss, weight) in LOSSES.items()},
    "a loss of torch.nn": (lambda: Second(bias=False), {"loss": plain_loss, "loss_fn": nn.CrossEntropyLoss()}),
    "a frozen head": (lambda: Model(trained=False), {"loss": flat, "weight": valid}),
}
NOT_TILED = {
    "operator.truediv": lambda m, x, y: F.cross_entropy((m(x) / 2).mT, y.clamp(0)),
    "log_softmax": lambda m, x, y: F.nll_loss(F.log_softmax(m(x).flatten(0, 1), -1), y.clamp(0).flatten()),
    "indexing": lambda m, x, y: F.cross_entropy(
        m(x)[..., :-1].flatten(0, 1), y.clamp(0, CLASSES - 2).flatten()
    ),
}  # fmt: skip


def assert_tiled(model, **keywords):
    batches = [tokens(seed=seed) for seed in range(3)]
    assert_same_updates(model, batches, **{"micro_batch_size": 3, "head": "head", "make": "adam", **keywords})


@pytest.mark.parametrize(("make", "keywords"), TILED.values(), ids=TILED)
def test_tiles_make_the_update_of_whole_logits(make, keywords, caplog):
    model = make()
    assert_tiled(model, **keywords)
    assert AT_ONCE not in caplog.text
    assert model.head.weight.requires_grad or model.head.weight.grad is None
    assert type(model.head) is nn.Linear


@pytest.mark.parametrize(("what", "loss"), NOT_TILED.items(), ids=NOT_TILED)
def test_what_takes_no_tiles_is_computed_and_said_once(what, loss, caplog):
    assert_tiled(Model(), loss=loss)
    (record,) = [record for record in caplog.records if AT_ONCE in record.message]
    assert f"for {what!r}" in record.message


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_head_of_transformers_is_found(kind, caplog):
    """GPT-2's weights are tied to its embedding; the model's own loss computes in float32."""
    model, _ = packed(kind, data("right"), loss=output_loss, micro_batch_size=4, max_tokens=None, head="auto")
    assert AT_ONCE not in caplog.text
    assert type(model.get_output_embeddings()) is nn.Linear


def test_logits_never_exist():
    """Of 64 tokens and 4096 classes; a tile has three rows."""
    peaks, x = [], torch.zeros(16, 8).long()
    for head in (None, "1"):
        model = nn.Sequential(nn.Embedding(10, 2), nn.Linear(2, 4096))
        step = step_of(model, micro_batch_size=8, head=head, compute_loss=flat)
        step(x, x)
        with LiveBytes() as live:
            step(x, x)
        peaks.append(live.peak)
    whole = 8 * 8 * 4096 * 4
    assert peaks[0] > whole
    assert peaks[1] < whole / 2


@pytest.mark.parametrize("around", ["model", "model and loss"])
def test_autocast_casts_where_it_does_without_tiles(around):
    """The numbers are the same; the tiles' gradients are added up in another order, of bfloat16 each."""
    model, (x, y), found = Model(dtype=torch.float32), tokens(), []
    for head in (None, "head"):
        with tiling(model, head)(), torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
            if around == "model and loss":
                loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        if around == "model":
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").float().sum()
        found.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    assert found[0][0].dtype == found[1][0].dtype
    assert relative_error(found[1][:1], found[0][:1]) <= FLOAT32
    assert relative_error(found[1][1:], found[0][1:]) <= 2 * torch.finfo(torch.bfloat16).eps


def test_copies_of_a_model_compute_with_their_own_weights():
    model = Model()
    with tiling(model, "head")():
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.head.weight.zero_()
        found, own = (float(m(tokens()[0]).whole("a look").detach().abs().sum()) for m in (other, model))
        assert found < own
    assert type(model.head) is nn.Linear
