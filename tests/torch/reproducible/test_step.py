"""TrainStep(reproducible=True) on one process: the large batch's update, whose random numbers follow from its place."""

import copy

import pytest
import torch
from torch import nn

from gradaccum.errors import WindowError
from gradaccum.torch import TrainStep, chunked
from tests.reference import relative_error
from tests.torch.reproducible.problems import CROSS_ENTROPY, KINDS, Training, plain

OTHERS = "dropout", "own generators", "batch norm", "pooled", "bfloat16", "wide sums"
COMPARED = [kind for kind in KINDS if kind not in OTHERS]
"""What depends neither on places and sizes of micro-batches nor on the rounding of half precision."""


@pytest.mark.parametrize("kind", COMPARED)
def test_updates_are_the_large_batches(kind):
    training, whole = Training(kind, wide=True), Training(kind, wide=True)
    options = {key: value for key, value in whole.options.items() if key != "scaler"}
    step = TrainStep(whole.model, whole.optimizer, micro_batch_size=1000, verify=False, **options)
    for _ in range(2):
        for batch in training.loader():
            loss, expected = training.update(batch), step(*batch)
            assert relative_error([loss], [expected]) <= 1e-12
    assert relative_error(training.model.parameters(), whole.model.parameters()) <= 1e-12


def test_a_gradient_that_outgrows_its_grid_starts_the_window_over():
    model, passes = nn.Linear(6, 1, bias=False), []
    model.register_forward_hook(lambda *_: passes.append(1))
    step = TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), compute_loss=lambda model, x: model(x).mean(),
        micro_batch_size=4, reproducible=True, verify=False,
    )  # fmt: skip
    counts = []
    for factor in (1.0, 1.0, 1e-3, 1.0, 1e-3, 1e3, 0.0, 1e3):
        passes.clear()
        step(torch.full((8, 6), factor))
        assert model.weight.grad.tolist()[0] == pytest.approx([factor] * 6, rel=1e-6)
        counts.append(len(passes) - (step.updates == 1))  # one of the first looks for several losses
    assert counts == [4, 2, 2, 2, 2, 4, 2, 2]


def test_random_numbers_of_the_loop_are_left_as_found():
    training = Training("dropout")
    batch = next(iter(training.loader()))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    training.step(*batch)
    assert torch.equal(torch.get_rng_state(), state)


def test_each_update_draws_other_numbers_and_each_place_in_it():
    masks = []

    class Mask(nn.Dropout):
        def forward(self, x):
            masks.append(out := super().forward(torch.ones_like(x)))
            return x * out

    model = nn.Sequential(nn.Linear(6, 50), Mask(0.5), nn.Linear(50, 3))
    step = TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=CROSS_ENTROPY, micro_batch_size=4,
        reproducible=True, verify=False,
    )  # fmt: skip
    for _ in range(2):
        step(torch.randn(8, 6), torch.randint(3, (8,)))
    first, second = masks[2:4], masks[4:6]  # the first window found its grid before
    assert all(torch.equal(a, b) for a, b in zip(masks[:2], first, strict=True))
    assert len({tuple(mask.flatten().tolist()) for mask in (*first, *second)}) == 4


@pytest.mark.parametrize("kind", ["dropout", "own generators", "batch norm", "told", "scaler"])
def test_a_checkpoint_goes_on_with_the_same_bits(kind):
    whole = Training(kind, "AdamW")
    batches = [*whole.loader(), *whole.loader()]
    for batch in batches[:3]:
        whole.update(batch)
    resumed = Training(kind, "AdamW", seed=7)
    for name in ("model", "optimizer", "step", "scaler") if whole.scaler else ("model", "optimizer", "step"):
        getattr(resumed, name).load_state_dict(copy.deepcopy(getattr(whole, name).state_dict()))
    if kind == "own generators":
        resumed.model[0].generator.manual_seed(99)
    whole.found = []
    for batch in batches[3:]:
        whole.update(batch)
        resumed.update(batch)
    assert resumed.step.updates == whole.step.updates
    assert resumed.bits() == whole.bits()


def test_backward_leaves_the_same_gradient():
    one, two = Training("dropout").run(1), Training("dropout").run(1, backward=True)
    assert one.bits() == two.bits()


def test_parameters_of_no_optimizer_have_the_mean_gradient_too():
    training = Training("plain")
    training.optimizer.param_groups[0]["params"].pop(0)
    batch = next(iter(training.loader()))
    training.step(*batch)
    torch.manual_seed(0)
    other = plain()
    CROSS_ENTROPY(other(batch[0]), batch[1]).backward()
    assert relative_error([training.model[0].weight.grad], [other[0].weight.grad]) <= 1e-6


def test_infinite_gradients_reach_the_optimizer_as_they_are():
    training = Training("plain")
    x, y = next(iter(training.loader()))
    x[5, 2] = float("inf")
    training.step(x, y)
    torch.manual_seed(0)
    model = plain()
    CROSS_ENTROPY(model(x), y).backward()
    assert model[0].weight.grad.isnan().any()
    for ours, theirs in zip(training.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.isnan(), theirs.grad.isnan())


REFUSED = {
    "auto": ({"micro_batch_size": "auto"}, "must have a fixed size"),
    "max_tokens": ({"max_tokens": 100}, "can't be packed"),
    "groups": ({"groups": 2}, "`groups` changes"),
    "exact": ({"batch_norm": "exact"}, "sums span the batch"),
    "noise": ({"noise_scale": True}, "`noise_scale`"),
    "sync": ({"sync": "micro_batch"}, "once per update"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_reproducible_is_refused(name):
    options, message = REFUSED[name]
    model = plain()
    with pytest.raises(ValueError, match=f"reproducible=True makes the same bits.*{message}"):
        TrainStep(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=CROSS_ENTROPY, reproducible=True,
            **{"micro_batch_size": 4, **options},
        )  # fmt: skip


def test_modules_and_optimizers_that_cannot_be_reproducible_are_refused():
    sync, sparse = nn.SyncBatchNorm(3), nn.Embedding(3, 3, sparse=True)
    for module, message in ((sync, "SyncBatchNorm"), (sparse, "sparse gradients"), (chunked(plain(), 4), "chunked")):
        model = nn.Sequential(nn.Linear(3, 3), module)
        with pytest.raises(ValueError, match=message):
            TrainStep(
                model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=CROSS_ENTROPY, micro_batch_size=4,
                reproducible=True,
            )  # fmt: skip
    model = plain()
    with pytest.raises(ValueError, match="evaluate a closure"):
        TrainStep(
            model, torch.optim.LBFGS(model.parameters()), loss_fn=CROSS_ENTROPY, micro_batch_size=4, reproducible=True
        )


def test_a_last_micro_batch_of_one_row_is_refused_where_batch_norm_needs_two():
    training = Training("batch norm")
    x, y = next(iter(training.loader()))
    with pytest.raises(ValueError, match="has one row"):
        training.step(x[:9], y[:9])


def test_passes_that_do_not_repeat_their_bits_are_an_error():
    scale = iter(10.0 ** torch.arange(0, 60, 5))
    model = nn.Linear(6, 1)
    step = TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=4, reproducible=True, verify=False,
        compute_loss=lambda model, x: next(scale) * model(x).mean(),
    )  # fmt: skip
    with pytest.raises(WindowError, match="don't repeat their bits"):
        step(torch.ones(4, 6))
