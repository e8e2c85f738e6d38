"""Huge vocabularies: the head and the loss in tiles make the update of the logits that never exist."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum.torch import TrainStep
from gradaccum.torch.head import tiling
from gradaccum.torch.measure.fake_memory import LiveBytes
from tests.reference import FLOAT32, relative_error
from tests.torch.train_step.test_padding import assert_same_for_transformers, data, output_loss, shifted, tiny
from tests.torch.train_step.test_train_step import OPTIMIZERS, assert_same_updates, plain_loss

CLASSES = 23


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Of three rows."""
    monkeypatch.setattr("gradaccum.torch.head.NUMBERS", 3 * CLASSES)


class Model(nn.Module):
    """Tokens, a layer, and a head over classes."""

    def __init__(self, bias=True, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, 6, dtype=dtype)
        self.head = nn.Linear(6, CLASSES, bias=bias, dtype=dtype)

    def forward(self, x):
        return self.head(torch.tanh(self.embedding(x)))


def tokens(rows=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(CLASSES, (rows, 5), generator=generator)
    y = torch.randint(CLASSES, (rows, 5), generator=generator)
    return x, y.masked_fill(torch.rand(y.shape, generator=generator) < 0.2, -100)


WEIGHTS = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)
LOSSES = {
    "flat": (lambda m, x, y: F.cross_entropy(m(x).view(-1, CLASSES), y.flatten()), lambda x, y: (y != -100).sum()),
    "transposed": (lambda m, x, y: F.cross_entropy(m(x).transpose(1, 2), y), lambda x, y: (y != -100).sum()),
    "next token": (
        lambda m, x, y: F.cross_entropy(m(x)[:, :-1].contiguous().double().reshape(-1, CLASSES), y[:, 1:].flatten()),
        lambda x, y: (y[:, 1:] != -100).sum(),
    ),
    "one of each row": (lambda m, x, y: F.cross_entropy(m(x)[..., 2:3, :].flatten(0, 1), y[:, 2].clamp(0)), None),
    "weighted, smooth": (
        lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten(), weight=WEIGHTS, label_smoothing=0.1),
        lambda x, y: WEIGHTS[y[y != -100]].sum(),
    ),
    "sum": (
        lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten(), reduction="sum") / len(x), None
    ),
    "none": (
        lambda m, x, y: F.cross_entropy(m(x).mT, y, reduction="none").square().sum(1).mean(), None
    ),
}  # fmt: skip


def assert_tiled(compute_loss, weight, model=None, **keywords):
    """A model after three updates, and one after three ordinary steps: their parameters and losses are the same."""
    data = [tokens(seed=seed) for seed in range(3)]
    keywords = {"micro_batch_size": 3, "head": "head", "weight": weight, **keywords}
    assert_same_updates(model or Model(), data, compute_loss, **keywords)


@pytest.mark.parametrize("kind", LOSSES)
def test_tiles_make_the_update_of_whole_logits(kind, caplog):
    assert_tiled(*LOSSES[kind])
    assert not [record for record in caplog.records if "computed at once" in record.message]


def test_a_torch_nn_loss_takes_tiles():
    class Second(Model):
        def forward(self, x):
            return super().forward(x).transpose(1, 2)

    model = Second(bias=False)
    assert_tiled(plain_loss, None, model, make="adam", loss_fn=nn.CrossEntropyLoss(), head=model.head)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_head_of_transformers_is_found(kind, caplog):
    """GPT-2's weights are tied to its embedding; the model's own loss computes in float32."""
    model = tiny(kind)
    keywords = {"compute_loss": output_loss, "weight": shifted, "micro_batch_size": 4, "head": "auto"}
    assert_same_for_transformers(model, data("right"), **keywords)
    assert not [record for record in caplog.records if "computed at once" in record.message]
    assert type(model.get_output_embeddings()) is nn.Linear


def test_logits_never_exist():
    """Of 64 tokens and 4096 classes; a tile has three rows."""
    peaks = []
    for head in (None, "1"):
        model = nn.Sequential(nn.Embedding(10, 2), nn.Linear(2, 4096))
        step = TrainStep(
            model, OPTIMIZERS["sgd"](model.parameters()), verify=False, micro_batch_size=8, head=head,
            compute_loss=lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten()),
        )  # fmt: skip
        x = torch.zeros(16, 8).long()
        step(x, x)
        with LiveBytes() as live:
            step(x, x)
        peaks.append(live.peak)
    whole = 8 * 8 * 4096 * 4
    assert peaks[0] > whole
    assert peaks[1] < whole / 2


def test_what_takes_no_tiles_is_computed_and_said_once(caplog):
    def halved(m, x, y):
        return F.cross_entropy((m(x) / 2).mT, y.clamp(0))

    def own(m, x, y):
        return F.nll_loss(F.log_softmax(m(x).flatten(0, 1), -1), y.clamp(0).flatten())

    def of_some_classes(m, x, y):
        return F.cross_entropy(m(x)[..., :-1].flatten(0, 1), y.clamp(0, CLASSES - 2).flatten())

    for loss, what in ((halved, "operator.truediv"), (own, "log_softmax"), (of_some_classes, "indexing")):
        caplog.clear()
        assert_tiled(loss, None)
        (record,) = [record for record in caplog.records if "computed at once" in record.message]
        assert f"for {what!r}" in record.message


@pytest.mark.parametrize("around", ["model", "model and loss"])
def test_autocast_casts_where_it_does_without_tiles(around):
    """The numbers are the same; the tiles' gradients are added up in another order, of bfloat16 each."""
    model = Model(dtype=torch.float32)
    x, y = tokens()
    found = []
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


def test_frozen_heads_get_no_gradient():
    model = Model()
    model.head.requires_grad_(False)
    assert_tiled(*LOSSES["flat"], model)
    assert model.head.weight.grad is None


def test_copies_of_a_model_compute_with_their_own_weights():
    model = Model()
    with tiling(model, "head")():
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.head.weight.zero_()
        found, own = (float(m(tokens()[0]).whole("a look").detach().abs().sum()) for m in (other, model))
        assert found < own
    assert type(model.head) is nn.Linear


@pytest.mark.parametrize(
    ("head", "error", "message"),
    [
        ("nowhere", ValueError, "no module 'nowhere'"),
        ("embedding", TypeError, "must be an nn.Linear with its own forward"),
        (nn.Linear(2, 2), ValueError, "must be a module of the model"),
        (3, TypeError, "Received: 3 of type int"),
        ("auto", ValueError, "transformers' models. Received: Model"),
    ],
)
def test_what_is_no_head_is_refused(head, error, message):
    with pytest.raises(error, match=message):
        tiling(Model(), head)
