"""What the tests of blocks share: a network of residual blocks, losses, and training of it beside ordinary steps."""

import contextlib
import copy

import torch
from torch import nn

from gradaccum.torch import BlockStep, TrainStep
from tests.reference import relative_error
from tests.torch.train_step import steps

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}
WAYS = {
    "after backward": {},
    "without a proof": {"verify": False},
    "in backward": {"update": "in_backward"},
    "on the CPU": {"on": "cpu"},
    "in backward on the CPU": {"update": "in_backward", "on": "cpu", "offload": True},
}


class Layer(nn.Module):
    """A residual block with an argument that all blocks share, and a tuple of outputs."""

    def __init__(self, size, dropout=0.0):
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, shared, *, scale=1.0):
        y = self.outer(torch.tanh(self.inner(self.norm(x)) + shared))
        return x + scale * self.dropout(y), shared


class Doing(Layer):
    """The same, after `do(layer, x)`, which returns another x; `after` that, `kept(layer, x)` of what it returns."""

    def __init__(self, do, kept=lambda layer, x: None):
        super().__init__(6)
        self.do, self.kept = do, kept

    def forward(self, x, shared, *, scale=1.0):
        x, shared = super().forward(self.do(self, x), shared, scale=scale)
        self.kept(self, x)
        return x, shared


class Network(nn.Module):
    """Embeddings, blocks, and a head whose weight is the embeddings'; functions say how blocks are called.

    `shared(model, x)` is the argument of all blocks, `between(x)` stands before each, `call(layer, x, shared)` calls
    it; with `skips`, what stands between goes to the head as well.
    """

    def __init__(self, size=6, depth=3, dropout=0.0, vocabulary=11, layer=Layer, order=None, skips=False, **how):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size)
        self.position = nn.Linear(size, 2 * size)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList([layer(size, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.order, self.skips = order or range(depth), skips
        usual = {
            "shared": lambda model, x: model.position(x),
            "between": lambda x: x,
            "call": lambda layer, x, shared: layer(x, shared, scale=0.5),
        }
        self.how = usual | how

    def forward(self, ids):
        x = self.dropout(self.embedding(ids))
        shared, skipped = self.how["shared"](self, x), x
        for place in self.order:
            x = self.how["between"](x)
            skipped = skipped + x if self.skips else skipped
            x, shared = self.how["call"](self.layers[place], x, shared)
        return self.head(self.norm(x + skipped + shared[..., : x.shape[-1]]))


def network(**options):
    torch.manual_seed(0)
    return Network(**options).double()


def doing(do=lambda layer, x: x, kept=lambda layer, x: None, places=(0, 1, 2), **options):
    """A network some of whose blocks do something of their own."""
    model = network(**options)
    for place in places:
        model.layers[place] = Doing(do, kept).double()
    return model


def late():
    """Its first block uses a weight of the last one, which is not among its modules."""
    model = doing(lambda layer, x: x + 0.1 * layer.other[0].norm.weight, places=[0])
    model.layers[0].other = [model.layers[2]]
    return model


def batches(rows=7, count=3):
    torch.manual_seed(1)
    return [(torch.randint(11, (rows, 5)), torch.randint(11, (rows, 5))) for _ in range(count)]


def loss_of(model, ids, labels):
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def token_mean(model, ids, labels):
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=0)


def counted(ids, labels):
    return (labels != 0).sum()


def with_its_weight(model, ids, labels):
    return token_mean(model, ids, labels), counted(ids, labels)


def build(model, optimizer=None, **options):
    """A BlockStep; a TrainStep with blocks=None."""
    optimizer = OPTIMIZERS["sgd"](model.parameters()) if optimizer is None else optimizer
    options = {"compute_loss": loss_of, "micro_batch_size": 3, "blocks": "auto", **options}
    if options["blocks"] is None:
        return TrainStep(model, optimizer, **{name: value for name, value in options.items() if name != "blocks"})
    return BlockStep(model, optimizer, **options)


def trained(model, data=None, optimizer=None, **options):
    """Parameters, buffers and losses after these updates."""
    step = build(model, optimizer, **options)
    losses = [step(*batch) for batch in data or batches()]
    return [t.detach().double() for t in (*model.parameters(), *model.buffers(), *losses)]


@contextlib.contextmanager
def unchanged(model):
    """Nothing of the model may be updated inside, and no gradient left."""
    before = copy.deepcopy(model.state_dict())
    yield
    assert relative_error(model.state_dict().values(), before.values()) == 0.0
    assert all(p.grad is None for p in model.parameters())


def assert_same_updates(model, data, loss=loss_of, make=OPTIMIZERS["sgd"], size=2, **options):
    """Train a copy by ordinary steps and the model layer by layer: the same parameters, the same losses."""
    return steps.assert_same_updates(model, data, loss, make, kind=BlockStep, micro_batch_size=size, **options)
