"""What micro-batches have of their own, such as random numbers and buffers, is with blocks what it is without them."""

import inspect
import random
import types

import numpy as np
import pytest
import torch
from torch import nn

from gradaccum.on_torch.random_state import RandomState
from gradaccum.torch import BlockStep, TrainStep
from gradaccum.torch.layers.refused import NOT_TAKEN
from tests.reference import FLOAT64, relative_error
from tests.torch.chunking.problems import seeded
from tests.torch.layers import problems
from tests.torch.layers.problems import WAYS, Layer, batches, doing, loss_of, network, token_mean, trained
from tests.torch.layers.test_refused import OPTIONS as REFUSED
from tests.torch.problems import GENERATORS, drawn


def masked(x, generator):
    return x * (drawn(generator, *x.shape) < 0.5)


class Drawing(Layer):
    """Draws from the generator that it is given, or has."""

    generator = None

    def forward(self, x, shared, *, scale=1.0, given=None):
        generator = getattr(given, "inside", given) or self.generator
        return super().forward(x if generator is None else masked(x, generator), shared, scale=scale)


def given(wrap):
    return lambda generator: network(layer=Drawing, call=lambda layer, *x: layer(*x, given=wrap(generator)))


def with_attributes(value, on=lambda model: [model], **options):
    """A network that has the generator, or a list with it, as an attribute of some modules."""
    model = network(layer=Drawing, **options)
    for module in on(model):
        module.generator = value
    return model


def after_blocks(generator):
    model = network()
    model.norm.register_forward_pre_hook(lambda norm, args: (masked(args[0], generator),))
    return model


HOW = {  # where the generator is that is drawn from: a network
    "passed to blocks": given(lambda generator: generator),
    "passed to blocks in an object": given(lambda generator: types.SimpleNamespace(inside=generator)),
    "attribute of blocks": lambda generator: with_attributes(generator, on=lambda model: model.layers),
    "global of blocks": lambda generator: doing(lambda layer, x: masked(x, GLOBAL)),
    "before blocks": lambda generator: with_attributes(
        generator, shared=lambda model, x: masked(model.position(x), model.generator)
    ),
    "in a list, before blocks": lambda generator: with_attributes(
        [generator], shared=lambda model, x: masked(model.position(x), model.generator[0])
    ),
    "after blocks": after_blocks,
    "in the loss, before the model": lambda generator: network(),
}


def drawn_by(kind, how, **options):
    """What an update makes, and where the generator stands."""
    global GLOBAL
    GLOBAL = generator = GENERATORS[kind]()

    def in_loss(model, ids, labels):
        return loss_of(model, masked(ids, generator), labels)

    compute_loss = in_loss if "loss" in how else loss_of  # the latter knows no generator
    found = trained(HOW[how](generator), compute_loss=compute_loss, **{"verify": False, **options})
    return found, RandomState([generator])


def assert_same_place(here, there):
    here.states = dict(zip(there.states, here.states.values(), strict=True))
    assert there.moved(here) == []


WITHOUT = {"without blocks": {"blocks": None}}  # a proof alone
RUNS = [(kind, how, "without a proof") for kind in GENERATORS for how in HOW]
RUNS += [(kind, "before blocks", way) for kind in ("numpy Generator", "random.Random") for way in WITHOUT]
RUNS += [
    ("torch.Generator", how, way)
    for how in ("passed to blocks", "global of blocks", "before blocks")
    for way in WAYS
    if way != "without a proof"
]


@pytest.mark.parametrize(("kind", "how", "way"), RUNS)
def test_blocks_draw_what_the_model_draws_without_them_update_after_update(kind, how, way):
    expected, there = drawn_by(kind, how, blocks=None)
    found, here = drawn_by(kind, how, **{"blocks": "layers", "verify": True, **(WAYS | WITHOUT)[way]})
    assert relative_error(found, expected) <= FLOAT64
    assert_same_place(here, there)


@pytest.mark.parametrize("kind", ["numpy Generator", "random.Random"])
def test_a_pass_that_counts_leaves_generators_where_they_were(kind):
    generator, expected, model = GENERATORS[kind](), GENERATORS[kind](), nn.Linear(3, 3)

    def compute_loss(model, x):
        y, kept = model(x), masked(torch.ones(x.shape).double(), generator) + 0.5
        return {"kept": ((y * kept).sum() / kept.sum(), kept.sum()), "all": (y.abs().mean(), len(y))}

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    TrainStep(model, optimizer, compute_loss=compute_loss, micro_batch_size=2, verify=False)(torch.ones(4, 3))
    masked(torch.ones(4, 3), expected)
    assert_same_place(RandomState([generator]), RandomState([expected]))


def of_global_generators(later):
    """Blocks that draw from Python's and NumPy's own generators, maybe from the second update on alone."""

    def draw(layer, x):
        if later and torch.equal(layer.inner.weight, initial):
            return x
        return x * (random.random() + np.random.rand())  # noqa: NPY002  # the global one, which is replayed

    model = doing(draw, places=[1])
    initial = model.layers[1].inner.weight.detach().clone()
    return model


class Normed(Layer):
    def __init__(self, size, dropout=0.0):
        super().__init__(size, dropout)
        self.batch_norm = nn.BatchNorm1d(size)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, shared, *, scale=1.0):
        self.calls = self.calls + 1
        return super().forward(self.batch_norm(x.transpose(1, 2)).transpose(1, 2), shared, scale=scale)


def spectral():
    """Before the blocks and in them; of these BatchNorm runs once, the others twice."""
    torch.manual_seed(0)
    one, two, three = (nn.utils.parametrizations.spectral_norm(nn.Linear(n, 6)) for n in (5, 6, 6))
    stem = nn.Sequential(one, nn.BatchNorm1d(6))
    return nn.Sequential(stem, nn.Sequential(two, three, nn.BatchNorm1d(6)), nn.Linear(6, 3)).double()


OPTIONS = {
    "clip_grad_value": {"clip_grad_value": 0.01},
    "loss_fn": {"loss_fn": lambda outputs, y: nn.functional.mse_loss(outputs.mean(2), y + 0.0), "compute_loss": None},
    "compute_loss": {"compute_loss": lambda *batch: dict.fromkeys("ab", (loss_of(*batch), len(batch[1])))},
    "weight": {"compute_loss": token_mean, "weight": problems.counted},
    "weight returned": {"compute_loss": problems.with_its_weight},
    "reduction": {"compute_loss": lambda *batch: token_mean(*batch) * problems.counted(*batch[1:]), "reduction": "sum"},
    "batch_dims": {"compute_loss": lambda model, ids, y: loss_of(model, ids, y.T), "batch_dims": (0, 1)},
    "groups": {"groups": 2},
    "autocast": {"autocast": torch.bfloat16},
    "accumulate_dtype": {"accumulate_dtype": torch.float64},
    "batch_norm": {"batch_norm": "pooled"},
    "offload": {"offload": True},
    "memory_limit": {"memory_limit": "64GiB"},
    "verify": {"verify": True},
}
PICTURES = [(torch.randn(8, 5, dtype=torch.float64), torch.arange(8) % 3) for _ in range(2)]
IN_SPECTRAL = {"loss_fn": nn.CrossEntropyLoss(), "compute_loss": None, "data": PICTURES, "blocks": "1"}
ALIKE = {  # the model, options, the largest error
    **{name: (network, options, FLOAT64) for name, options in OPTIONS.items()},
    "dropout": (lambda: network(dropout=0.3), {}, FLOAT64),
    "Python's and NumPy's random numbers": (lambda: of_global_generators(False), {"micro_batch_size": 3}, FLOAT64),
    "the same from the second update on": (lambda: of_global_generators(True), {"micro_batch_size": 3}, FLOAT64),
    "autocast of float32": (lambda: network().float(), {"autocast": torch.bfloat16}, 1e-6),
    "wide sums of narrow gradients": (lambda: network().bfloat16(), {"accumulate_dtype": torch.float32}, 0.0),
    "moving buffers": (lambda: network(layer=Normed), {"batch_norm": "micro"}, FLOAT64),
    # BatchNorm amplifies the rounding of biases before it.
    "power iterations": (spectral, {"batch_norm": "micro", **IN_SPECTRAL}, 1e-9),
}


@pytest.mark.parametrize("way", ["in backward", "on the CPU"])
@pytest.mark.parametrize("name", ALIKE)
def test_the_update_with_blocks_is_that_of_accumulation(name, way):
    make, options, tolerance = ALIKE[name]
    data = [(ids, y.T if name == "batch_dims" else y) for ids, y in batches(rows=8, count=2)]
    given = {"data": data, "blocks": "layers", "micro_batch_size": 4, "verify": False, **WAYS[way], **options}
    plain = {key: value for key, value in given.items() if key not in ("update", "on", "offload")}
    found = []
    for keywords in ({**plain, "blocks": None}, given):
        model = make()
        seeded()
        found.append([*trained(model, **keywords), torch.get_rng_state(), torch.tensor(random.random())])
        assert all(p.grad is None or p.grad.dtype == p.dtype for p in model.parameters())
    assert relative_error(found[1], found[0]) <= tolerance


@pytest.mark.slow
def test_rows_by_tokens_and_packed_ones_are_those_of_accumulation_in_backward():
    pytest.importorskip("transformers")
    from gradaccum.torch.packing import causal_lm
    from tests.torch.train_step.test_padding import data, next_token_mean, shifted, tiny

    for pack in (None, causal_lm):
        updated = []
        for update in ("after_backward", "in_backward"):
            keywords = {"weight": shifted, "max_tokens": 24, "pack": pack, "micro_batch_size": "auto", "update": update}
            options = {"compute_loss": next_token_mean, "blocks": "model.layers", "verify": False, **keywords}
            updated.append(trained(tiny("llama"), data("right", 1), **options))
        assert relative_error(*updated) <= FLOAT64


def test_each_option_is_in_the_table_above_or_in_that_of_what_is_refused():
    kinds = BlockStep, TrainStep
    taken, others = (set(inspect.signature(kind).parameters) - {"model", "optimizer"} for kind in kinds)
    assert taken <= {*REFUSED, *OPTIONS, "blocks", "update", "on", "max_tokens", "pack"}
    assert others - taken <= {*NOT_TAKEN}
