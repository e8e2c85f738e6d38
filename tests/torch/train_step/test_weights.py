"""Whatever a loss divides by, the micro-batches add up to the large batch's loss and update."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum import NotEquivalentError
from gradaccum.torch import BlockStep
from gradaccum.torch.loss import named, objective
from tests.reference import FLOAT64, relative_error
from tests.torch.train_step.problems import Experts, Of, batches, linear, network, plain_loss, randn
from tests.torch.train_step.steps import assert_same_state, assert_same_updates, by_hand, left_as_it_was, step_of

ROWS = 11


def shaped(outputs, function):
    """A linear layer, of whose outputs a function makes something."""
    return Of(lambda module, x: function(module.inner(x)), inner=linear(5, outputs))


MODELS = {
    "one": lambda: linear(5, 1),
    "two": lambda: linear(5, 2),
    "four": lambda: linear(5, 4),
    "log-probabilities": lambda: shaped(4, lambda x: x.log_softmax(-1)),
    "probabilities": lambda: shaped(2, torch.sigmoid),
    "positions": lambda: shaped(4 * 6, lambda x: x.unflatten(1, (4, 6))),
    "frames": lambda: shaped(4 * 6, lambda x: x.reshape(-1, 6, 4).log_softmax(-1).transpose(0, 1)),  # as CTC wants them
    "1 + 1": lambda: shaped(2, lambda x: x.split(1, 1)),
    "3 + 3": lambda: shaped(6, lambda x: x.split(3, 1)),
    "3 + 3 + 3": lambda: shaped(9, lambda x: x.split(3, 1)),
}


def classes(*shape, count=4, ignored=None):
    targets = torch.randint(0, count, (ROWS, *shape))
    if ignored is not None:
        targets[torch.rand(targets.shape) < 0.4] = ignored
        targets[:3] = ignored  # whole micro-batches with nothing but ignored targets
    return targets


def binary(columns):
    return torch.randint(0, 2, (ROWS, columns)).double()


TARGETS = {
    "numbers": lambda: randn(ROWS, 2),
    "positive": lambda: randn(ROWS, 2).exp(),
    "between 0 and 1": lambda: randn(ROWS, 2).sigmoid(),
    "with variances": lambda: (randn(ROWS, 2), randn(ROWS, 2).exp()),
    "classes": classes,
    "ignored": lambda: classes(ignored=-100),
    "1 ignored": lambda: classes(ignored=1),
    "of positions": lambda: classes(6, ignored=-100),
    "probabilities": lambda: randn(ROWS, 4).softmax(-1),
    "logarithms": lambda: randn(ROWS, 4).log_softmax(-1),
    "signs": lambda: binary(1) * 2.0 - 1.0,
    "flat signs": lambda: binary(1)[:, 0] * 2.0 - 1.0,
    "two bits": lambda: binary(2),
    "four bits": lambda: binary(4),
    "one label": lambda: F.pad(classes(1), (0, 3), value=-1),
    "sequences": lambda: (torch.randint(1, 4, (ROWS, 3)), torch.full((ROWS,), 6), torch.randint(1, 4, (ROWS,))),
    "none": tuple,
}
WEIGHTS, BITS = torch.tensor([0.2, 3.0, 1.0, 0.7]).double(), torch.tensor([2.0, 5.0]).double()
cross_entropy, weighted = nn.CrossEntropyLoss, partial(nn.CrossEntropyLoss, weight=WEIGHTS)
LOSSES = {  # name: (loss with a reduction, model, targets)
    "L1": (nn.L1Loss, "two", "numbers"),
    "MSE": (nn.MSELoss, "two", "numbers"),
    "Huber": (nn.HuberLoss, "two", "numbers"),
    "SmoothL1": (nn.SmoothL1Loss, "two", "numbers"),
    "CrossEntropy": (cross_entropy, "four", "classes"),
    "CrossEntropy, class weights": (weighted, "four", "classes"),
    "CrossEntropy, ignored": (cross_entropy, "four", "ignored"),
    "CrossEntropy, smooth, weights, ignored": (
        partial(weighted, label_smoothing=0.1, ignore_index=1), "four", "1 ignored"
    ),
    "CrossEntropy, positions": (cross_entropy, "positions", "of positions"),
    "CrossEntropy, positions, smooth": (partial(cross_entropy, label_smoothing=0.2), "positions", "of positions"),
    "CrossEntropy, probabilities": (partial(weighted, label_smoothing=0.1), "four", "probabilities"),
    "NLL": (partial(nn.NLLLoss, weight=WEIGHTS), "log-probabilities", "ignored"),
    "CTC": (partial(nn.CTCLoss, zero_infinity=True), "frames", "sequences"),
    "PoissonNLL": (nn.PoissonNLLLoss, "two", "positive"),
    "GaussianNLL": (nn.GaussianNLLLoss, "two", "with variances"),
    "KLDiv": (nn.KLDivLoss, "log-probabilities", "probabilities"),
    "BCE": (nn.BCELoss, "probabilities", "between 0 and 1"),
    "BCEWithLogits": (partial(nn.BCEWithLogitsLoss, pos_weight=BITS), "two", "two bits"),
    "MarginRanking": (nn.MarginRankingLoss, "1 + 1", "signs"),
    "HingeEmbedding": (nn.HingeEmbeddingLoss, "one", "signs"),
    "MultiLabelMargin": (nn.MultiLabelMarginLoss, "four", "one label"),
    "SoftMargin": (nn.SoftMarginLoss, "one", "signs"),
    "MultiLabelSoftMargin": (partial(nn.MultiLabelSoftMarginLoss, weight=WEIGHTS), "four", "four bits"),
    "CosineEmbedding": (nn.CosineEmbeddingLoss, "3 + 3", "flat signs"),
    "MultiMargin": (partial(nn.MultiMarginLoss, weight=WEIGHTS), "four", "classes"),
    "TripletMargin": (nn.TripletMarginLoss, "3 + 3 + 3", "none"),
    "TripletMarginWithDistance": (nn.TripletMarginWithDistanceLoss, "3 + 3 + 3", "none"),
}  # fmt: skip
OTHERS = {
    "KLDiv, over elements": (nn.KLDivLoss(log_target=True), "log-probabilities", "logarithms"),
    "a function": (F.cross_entropy, "log-probabilities", "ignored"),
    "a partial function": (partial(F.cross_entropy, weight=WEIGHTS), "log-probabilities", "ignored"),
    "a partial function of nothing": (partial(F.nll_loss), "log-probabilities", "ignored"),
    "a function's sum": (partial(F.mse_loss, reduction="sum"), "two", "numbers"),
}


def same_updates(loss_fn, model, targets):
    torch.manual_seed(3)
    data = [(randn(ROWS, 5), targets()) for _ in range(2)]

    def plain(model, x, y):
        outputs = model(x)
        loss = loss_fn(*(outputs if isinstance(outputs, tuple) else (outputs,)), *(y if isinstance(y, tuple) else (y,)))
        return getattr(loss, "loss", loss)

    assert_same_updates(model, data, plain, loss_fn=loss_fn, micro_batch_size=3)


SUMS = ("L1", "CrossEntropy, smooth, weights, ignored", "CTC", "KLDiv", "TripletMargin")
"""What divides by nothing is weighed alike: one of each kind of outputs and targets."""


@pytest.mark.parametrize(
    ("name", "reduction"),
    [
        *((name, "mean") for name in LOSSES),
        *(pytest.param(name, "sum", marks=[] if name in SUMS else pytest.mark.slow) for name in LOSSES),
    ],
)
def test_every_torch_loss_is_weighed_by_what_it_divides_by(name, reduction):
    make, model, targets = LOSSES[name]
    if name == "KLDiv" and reduction == "mean":
        reduction = "batchmean"  # torch warns about "mean", which is among the others
    same_updates(make(reduction=reduction), MODELS[model](), TARGETS[targets])


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
@pytest.mark.parametrize(("loss_fn", "model", "targets"), OTHERS.values(), ids=OTHERS)
def test_other_losses_and_functions_are_weighed_by_what_they_divide_by(loss_fn, model, targets):
    same_updates(loss_fn, MODELS[model](), TARGETS[targets])


WITH_PARAMETERS = {
    "AdaptiveLogSoftmaxWithLoss": {"cutoffs": [2, 6], "div_value": 2.0},
    "LinearCrossEntropyLoss": {},  # from torch 2.13 on
}


def test_every_loss_of_torch_nn_is_in_the_table_or_has_parameters():
    there = {name for name in vars(nn) if name.endswith("Loss")}
    assert there - {*WITH_PARAMETERS} <= {type(make(reduction="sum")).__name__ for make, _, _ in LOSSES.values()}
    for name in there & {*WITH_PARAMETERS}:
        torch.manual_seed(0)
        loss_fn = getattr(nn, name)(6, 10, **WITH_PARAMETERS[name]).double()
        same_updates(loss_fn, linear(5, 6), partial(classes, count=10, ignored=-100 if "Linear" in name else None))


@pytest.mark.filterwarnings("ignore:linear_cross_entropy. ``options`` ignored")  # says torch, of label smoothing
@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="new in torch 2.13")
@pytest.mark.parametrize("chunks", [True, False])
@pytest.mark.parametrize("ignored", [-100, 1])
@pytest.mark.parametrize(
    "options", [{}, {"weight": WEIGHTS}, {"weight": WEIGHTS, "label_smoothing": 0.1}, {"reduction": "sum"}], ids=str
)
def test_a_vocabulary_in_chunks_tied_to_an_embedding_makes_the_large_batchs_update(chunks, ignored, options):
    torch.manual_seed(0)
    chunked_by = nn.LinearCrossEntropyOptions(batch_chunk_size=2) if chunks else None
    loss_fn = nn.LinearCrossEntropyLoss(6, 4, bias=True, ignore_index=ignored, options=chunked_by, **options).double()
    model = nn.Sequential(nn.Embedding(4, 6, dtype=torch.float64), nn.Tanh(), linear(6, 6))
    model[0].weight = loss_fn.linear.weight
    both = nn.ModuleList([model, loss_fn])
    whole = copy.deepcopy(both)
    plain = nn.CrossEntropyLoss(ignore_index=ignored, **options)
    step = step_of(model, torch.optim.Adam(both.parameters()), loss_fn=loss_fn, micro_batch_size=3, verify=True)
    data = [(classes(), classes(ignored=ignored)) for _ in range(3)]
    losses = [step(*batch) for batch in data]
    expected, _ = by_hand(whole, data, lambda m, x, y: plain(m[1].linear(m[0](x)), y), torch.optim.Adam)
    assert relative_error(losses, expected) <= FLOAT64
    assert relative_error(both.parameters(), whole.parameters()) <= FLOAT64


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("shape", ["a tuple", "from the model"])
@pytest.mark.parametrize("targets", ["indices", "probabilities"])
def test_targets_are_known_wherever_they_come_from(shape, targets, verify):
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64))
    data = []
    for x, y in batches():
        if targets == "probabilities":
            y = F.one_hot(y, 3).double() * 0.8 + 0.1
        else:
            y[: 5 + len(data)] = -100
        data.append((x, (y,)) if shape == "a tuple" else ({"x": x, "y": y},))
    if shape == "a tuple":
        assert_same_updates(network(), data, lambda m, x, y: loss_fn(m(x), *y), loss_fn=loss_fn, verify=verify)
    else:
        model = Of(lambda module, batch: (module.inner(batch["x"]), batch["y"]), inner=network())
        assert_same_updates(model, data, lambda m, x: loss_fn(*m(x)), loss_fn=loss_fn, verify=verify)


# Where a user says what the mean is over.


def valid(*batch):
    return (batch[-1] != -100).sum()


def ways_to_say(loss, weight):
    """By a function of the batch, with the loss, or for losses by name."""
    return {
        "by a function": {"compute_loss": loss, "weight": weight},
        "with the loss": {"compute_loss": lambda model, *batch: (loss(model, *batch), weight(*batch))},
        "by name": {"compute_loss": lambda model, *batch: {"a": (loss(model, *batch), weight(*batch))}},
        "by name, by a function": {
            "compute_loss": lambda *both: {"a": loss(*both)}, "weight": lambda *batch: {"a": weight(*batch)}
        },
    }  # fmt: skip


def penalised(share, reduction="mean"):
    def loss(model, x, y):
        penalty = 0.1 * sum((p**2).sum() for p in model.parameters())
        return F.mse_loss(model(x), y, reduction=reduction) + penalty * share(x)

    return loss


def test_a_regulariser_is_exact_beside_a_mean_and_beside_a_sum_by_its_share_of_the_rows():
    data = [(randn(ROWS, 5), randn(ROWS, 2)) for _ in range(2)]
    assert_same_updates(linear(5, 2), data, penalised(lambda x: 1))
    shared = penalised(lambda x: len(x) / ROWS, "sum")
    assert_same_updates(linear(5, 2), data, penalised(lambda x: 1, "sum"), compute_loss=shared, reduction="sum")


NOT_ADDITIVE = {
    "a sum in place of a mean": ({"loss_fn": lambda *both: F.cross_entropy(*both, reduction="sum")}, 'reduction="sum"'),
    "a regulariser beside a sum": ({"compute_loss": penalised(lambda x: 1, "sum"), "reduction": "sum"}, "regulariser"),
}


@pytest.mark.parametrize(("keywords", "advice"), NOT_ADDITIVE.values(), ids=NOT_ADDITIVE)
def test_losses_that_are_not_additive_are_refused_with_advice(keywords, advice):
    model, (x, y) = nn.Sequential(linear(5, 3), nn.Dropout(0.5)), batches(ROWS)[0]
    y = randn(ROWS, 3) if advice == "regulariser" else y
    step = step_of(model, micro_batch_size=3, verify=True, **keywords)
    with left_as_it_was(model, NotEquivalentError, advice):
        step(x, y)


@pytest.fixture(params=["cpu", "accelerator"])
def device(request, monkeypatch):
    """On an accelerator, weights stay tensors, which are read when the window ends."""
    if request.param == "accelerator":
        for module in (named, objective):
            monkeypatch.setattr(module, "plain_weight", lambda weight: torch.as_tensor(weight))


NOTHING = {"by a loss_fn": {"loss_fn": nn.CrossEntropyLoss()}, **ways_to_say(plain_loss, valid)}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("keywords", NOTHING.values(), ids=NOTHING)
def test_a_batch_in_which_nothing_counts_makes_no_update_on_any_device(keywords, caplog):
    model = linear(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    step = step_of(model, optimizer, micro_batch_size=3, **keywords)
    caplog.set_level("INFO", logger="gradaccum")
    for count, y in ((1, classes()), (1, torch.full((ROWS,), -100)), (2, classes())):
        before = [p.clone() for p in model.parameters()]
        loss, weighs = step(randn(ROWS, 5), y), bool(valid(y))
        assert (bool(loss.isfinite()), step.updates) == (weighs, count)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters())) == (not weighs)
        assert all(mean.isfinite() == weighs for mean in step.losses.values())
    assert "No update: the total weight of this batch" in caplog.text


def masked(model, x, mask, y):
    """A mean whose gradient is NaN, too, where it is over nothing."""
    return ((model(x) - y).square().mean(1) * mask).sum() / mask.sum()


OVER_NOTHING = ways_to_say(masked, lambda x, mask, y: mask.sum())


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("make", ["sgd", "adam"])
@pytest.mark.parametrize("options", [None, {}, {"update": "in_backward"}], ids=["", "blocks", "in_backward"])
@pytest.mark.parametrize("how", OVER_NOTHING.values(), ids=OVER_NOTHING)
def test_a_mean_over_nothing_is_left_out_with_its_gradient_on_any_device(how, options, make):
    masks = torch.ones(4, ROWS)
    masks[1, 4:8], masks[2, :4], masks[3, 1:6] = 0, 0, 0
    data = [(randn(ROWS, 5), mask, randn(ROWS, 4)) for mask in masks]
    model, plain = (nn.Sequential(nn.Sequential(linear(5, 5), linear(5, 4))) for _ in range(2))
    expected, _ = by_hand(plain, data, masked, make)
    blocks = {} if options is None else {"kind": BlockStep, "blocks": "0", **options}
    step = step_of(model, make, micro_batch_size=4, verify=True, **how, **blocks)
    assert relative_error([step(*batch) for batch in data], expected) <= FLOAT64
    assert_same_state(model, plain)


def of_experts(model, x, kinds, y):
    return F.cross_entropy(model(x, kinds), y)


OF_EXPERTS = ways_to_say(of_experts, valid)


@pytest.mark.parametrize("how", OF_EXPERTS.values(), ids=OF_EXPERTS)
def test_parameters_that_only_rows_of_weight_0_reach_have_no_gradient_and_buffers_move_as_in_the_large_batch(how):
    model, plain, start = Experts(), Experts(), Experts()
    data = [(randn(4, 5), torch.tensor([0, 0, 1, 1]), torch.tensor([1, 2, -100, -100])) for _ in range(4)]
    by_hand(plain, data, of_experts, torch.optim.AdamW)
    step = step_of(model, torch.optim.AdamW(model.parameters()), micro_batch_size=2, verify=True, **how)
    for batch in data:
        step(*batch)
    assert all(p.grad is None for p in model.experts[1:].parameters())
    assert all(map(torch.equal, model.experts[1].parameters(), start.experts[1].parameters()))  # weight decay is off
    plain.experts[1].load_state_dict(start.experts[1].state_dict())
    assert_same_state(model, plain)


@pytest.mark.parametrize("how", OVER_NOTHING.values(), ids=OVER_NOTHING)
def test_rows_of_weight_0_draw_random_numbers_and_move_statistics_in_every_update(how):
    def left(mask):
        model = nn.Sequential(nn.BatchNorm1d(5, dtype=torch.float64), nn.Dropout(0.3), linear(5, 4))
        step = step_of(model, "sgd", micro_batch_size=2, batch_norm="micro", **how)
        states = []
        for seed in range(9):
            model.train(seed != 4)  # nothing is drawn in eval mode
            torch.manual_seed(seed)
            step(randn(4, 5), mask, randn(4, 4))
            states.append((hash(torch.get_rng_state().numpy().tobytes()), int(model[0].num_batches_tracked)))
        return states

    assert left(torch.ones(4)) == left(torch.tensor([0.0, 0.0, 1.0, 1.0]))


def test_a_hook_that_writes_to_a_losss_gradient_does_so_once_per_micro_batch():
    def doubled(model, x, y):
        loss = plain_loss(model, x, y)
        loss.register_hook(lambda gradient: gradient.mul_(2))
        return loss

    assert_same_updates(linear(5, 3), batches(8), doubled, compute_loss=doubled, micro_batch_size=2)
