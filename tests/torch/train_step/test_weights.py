"""Whatever a loss divides by, the micro-batches add up to the large batch's loss and update."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum import NotEquivalentError
from gradaccum.torch import TrainStep
from tests.torch.train_step.test_train_step import (
    assert_same_updates,
    batches,
    left_as_it_was,
    network,
    plain_loss,
    step_of,
)

ROWS = 11


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def linear(outputs):
    torch.manual_seed(0)
    return nn.Linear(5, outputs, dtype=torch.float64)


class Several(nn.Module):
    """A model with a tuple of outputs."""

    def __init__(self, *widths):
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(5, width, dtype=torch.float64) for width in widths)

    def forward(self, x):
        return tuple(head(x) for head in self.heads)


def classes(*shape, count=4, ignored=None):
    targets = torch.randint(0, count, (ROWS, *shape))
    if ignored is not None:
        targets[torch.rand(targets.shape) < 0.4] = ignored
        targets[:3] = ignored  # whole micro-batches with nothing but ignored targets
    return targets


def log_softmax():
    return nn.Sequential(linear(4), nn.LogSoftmax(-1))


class Frames(nn.Module):
    """Log-probabilities of 6 frames, as CTCLoss wants them: (frames, rows, classes)."""

    def __init__(self):
        super().__init__()
        self.inner = linear(6 * 4)

    def forward(self, x):
        return self.inner(x).reshape(-1, 6, 4).log_softmax(-1).transpose(0, 1)


def ctc_targets():
    return torch.randint(1, 4, (ROWS, 3)), torch.full((ROWS,), 6), torch.randint(1, 4, (ROWS,))


def positions():
    return nn.Sequential(linear(4 * 6), nn.Unflatten(1, (4, 6)))


def signs():
    return torch.randint(0, 2, (ROWS, 1)) * 2.0 - 1.0


def binary(columns):
    return torch.randint(0, 2, (ROWS, columns)).double()


def one_label():
    return torch.cat([classes(1), torch.full((ROWS, 3), -1)], 1)


def probabilities():
    return randn(ROWS, 4).softmax(-1)


CLASS_WEIGHTS = torch.tensor([0.2, 3.0, 1.0, 0.7], dtype=torch.float64)

# name: (loss with a reduction, model, targets)
one, two, four, ignored = (
    *(partial(linear, outputs) for outputs in (1, 2, 4)),
    partial(classes, ignored=-100),
)
numbers = partial(randn, ROWS, 2)
weighted = partial(nn.CrossEntropyLoss, weight=CLASS_WEIGHTS)
with_logits = partial(nn.BCEWithLogitsLoss, pos_weight=torch.tensor([2.0, 5.0], dtype=torch.float64))
LOSSES = {
    "L1": (nn.L1Loss, two, numbers),
    "MSE": (nn.MSELoss, two, numbers),
    "Huber": (nn.HuberLoss, two, numbers),
    "SmoothL1": (nn.SmoothL1Loss, two, numbers),
    "CrossEntropy": (nn.CrossEntropyLoss, four, classes),
    "CrossEntropy, class weights": (weighted, four, classes),
    "CrossEntropy, ignored": (nn.CrossEntropyLoss, four, ignored),
    "CrossEntropy, smooth, weights, ignored": (
        partial(weighted, ignore_index=1, label_smoothing=0.1),
        four,
        partial(classes, ignored=1),
    ),
    "CrossEntropy, positions": (nn.CrossEntropyLoss, positions, partial(ignored, 6)),
    "CrossEntropy, positions, smooth": (
        partial(nn.CrossEntropyLoss, label_smoothing=0.2),
        positions,
        partial(ignored, 6),
    ),
    "CrossEntropy, probabilities": (partial(weighted, label_smoothing=0.1), four, probabilities),
    "NLL": (partial(nn.NLLLoss, weight=CLASS_WEIGHTS), log_softmax, ignored),
    "CTC": (partial(nn.CTCLoss, zero_infinity=True), Frames, ctc_targets),
    "PoissonNLL": (nn.PoissonNLLLoss, two, lambda: numbers().exp()),
    "GaussianNLL": (nn.GaussianNLLLoss, two, lambda: (numbers(), numbers().exp())),
    "KLDiv": (nn.KLDivLoss, log_softmax, probabilities),
    "BCE": (nn.BCELoss, lambda: nn.Sequential(two(), nn.Sigmoid()), lambda: numbers().sigmoid()),
    "BCEWithLogits": (with_logits, two, partial(binary, 2)),
    "MarginRanking": (nn.MarginRankingLoss, partial(Several, 1, 1), signs),
    "HingeEmbedding": (nn.HingeEmbeddingLoss, one, signs),
    "MultiLabelMargin": (nn.MultiLabelMarginLoss, four, one_label),
    "SoftMargin": (nn.SoftMarginLoss, one, signs),
    "MultiLabelSoftMargin": (partial(nn.MultiLabelSoftMarginLoss, weight=CLASS_WEIGHTS), four, partial(binary, 4)),
    "CosineEmbedding": (nn.CosineEmbeddingLoss, partial(Several, 3, 3), lambda: signs()[:, 0]),
    "MultiMargin": (partial(nn.MultiMarginLoss, weight=CLASS_WEIGHTS), four, classes),
    "TripletMargin": (nn.TripletMarginLoss, partial(Several, 3, 3, 3), tuple),
    "TripletMarginWithDistance": (nn.TripletMarginWithDistanceLoss, partial(Several, 3, 3, 3), tuple),
}


def same_updates(loss_fn, model, targets):
    torch.manual_seed(3)
    data = [(randn(ROWS, 5), targets()) for _ in range(2)]

    def plain(model, x, y):
        outputs = model(x)
        return loss_fn(*(outputs if isinstance(outputs, tuple) else (outputs,)), *(y if isinstance(y, tuple) else (y,)))

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
        reduction = "batchmean"  # torch warns about "mean"; the test below has it
    same_updates(make(reduction=reduction), model(), targets)


OTHERS = {
    "KL divergence, a mean over elements": (
        nn.KLDivLoss(reduction="mean", log_target=True),
        log_softmax,
        lambda: probabilities().log(),
    ),
    "a function": (F.cross_entropy, log_softmax, ignored),
    "a partial function": (partial(F.cross_entropy, weight=CLASS_WEIGHTS), log_softmax, ignored),
    "a partial function of nothing": (partial(F.nll_loss), log_softmax, ignored),
    "a function's sum": (partial(F.mse_loss, reduction="sum"), two, numbers),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_and_functions_are_weighed_by_what_they_divide_by(name):
    loss_fn, model, targets = OTHERS[name]
    same_updates(loss_fn, model(), targets)


def test_every_loss_of_torch_nn_is_in_the_table():
    table = {type(make(reduction="sum")).__name__ for make, _, _ in LOSSES.values()}
    there = {name for name in vars(nn) if name.endswith("Loss")}
    left_out = {"AdaptiveLogSoftmaxWithLoss", "LinearCrossEntropyLoss"}  # with parameters: they are tested below
    assert there - left_out <= table


def test_losses_with_parameters_of_their_own():
    torch.manual_seed(0)
    adaptive = nn.AdaptiveLogSoftmaxWithLoss(6, 10, cutoffs=[2, 6], div_value=2.0).double()
    data = [(randn(ROWS, 5), classes(count=10))]
    keywords = {"loss_fn": adaptive, "micro_batch_size": 3}
    assert_same_updates(linear(6), data, lambda model, x, y: adaptive(model(x), y).loss, **keywords)
    if hasattr(nn, "LinearCrossEntropyLoss"):
        linear_loss = nn.LinearCrossEntropyLoss(6, 10, dtype=torch.float64)
        same_updates(linear_loss, linear(6), lambda: classes(count=10, ignored=-100))


class WithTargets(nn.Sequential):
    """Returns its targets beside its outputs, so that the batch says nothing about them."""

    def forward(self, batch):
        return super().forward(batch["x"]), batch["y"]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("shape", ["a tuple", "from the model"])
@pytest.mark.parametrize("targets", ["indices", "probabilities"])
def test_targets_are_known_wherever_they_come_from(shape, targets, verify):
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64))
    data = []
    for x, y in batches():
        if targets == "probabilities":
            y = torch.nn.functional.one_hot(y, 3).double() * 0.8 + 0.1
        else:
            y[: 5 + len(data)] = -100
        data.append((x, (y,)) if shape == "a tuple" else ({"x": x, "y": y},))
    keywords = {"loss_fn": loss_fn, "micro_batch_size": 4, "verify": verify}
    if shape == "a tuple":
        assert_same_updates(network(), data, lambda model, x, y: loss_fn(model(x), *y), **keywords)
    else:
        assert_same_updates(WithTargets(*network()), data, lambda model, x: loss_fn(*model(x)), **keywords)


def token_mean(model, x, y):
    mask = y != -100
    losses = F.cross_entropy(model(x), y, ignore_index=-100, reduction="none")
    return (losses * mask).sum() / mask.sum()


def token_data():
    torch.manual_seed(3)
    return [(randn(ROWS, 5), classes(6, ignored=-100)) for _ in range(2)]


def token_sum(model, x, y):
    return F.cross_entropy(model(x), y, ignore_index=-100, reduction="sum")


def valid(x, y):
    return (y != -100).sum()


TOLD = {
    "by a function": {"compute_loss": token_mean, "weight": valid},
    "with the loss": {"compute_loss": lambda m, *batch: (token_mean(m, *batch), valid(*batch))},
    "with the loss, as an int": {"compute_loss": lambda m, *batch: (token_mean(m, *batch), int(valid(*batch)))},
    "of a sum": {"compute_loss": token_sum, "weight": valid, "reduction": "sum"},
    "with a sum": {"compute_loss": lambda m, *batch: (token_sum(m, *batch), valid(*batch)), "reduction": "sum"},
}


@pytest.mark.parametrize("how", TOLD)
def test_what_the_mean_is_over_is_told(how):
    assert_same_updates(positions(), token_data(), token_mean, micro_batch_size=2, **TOLD[how])


def test_sums_without_weights_are_sums():
    assert_same_updates(positions(), token_data(), token_sum, reduction="sum", micro_batch_size=2)


def test_a_regulariser_is_exact_beside_a_mean_and_refused_beside_a_sum():
    def penalised(share, reduction="mean"):
        def loss(model, x, y):
            penalty = 0.1 * sum((p**2).sum() for p in model.parameters())
            return F.mse_loss(model(x), y, reduction=reduction) + penalty * share(x)

        return loss

    data = [(randn(ROWS, 5), randn(ROWS, 2)) for _ in range(2)]
    assert_same_updates(linear(2), data, penalised(lambda x: 1), micro_batch_size=3)
    sums = {"reduction": "sum", "micro_batch_size": 3}
    total = penalised(lambda x: 1, "sum")
    with pytest.raises(NotEquivalentError, match="regulariser"):
        step_of(linear(2), compute_loss=total, verify=True, **sums)(*data[0])
    shared = penalised(lambda x: len(x) / ROWS, "sum")  # its share of the rows makes it additive
    assert_same_updates(linear(2), data, total, compute_loss=shared, **sums)


@pytest.mark.parametrize("device", ["cpu", "accelerator"])
@pytest.mark.parametrize(
    "keywords",
    [
        {"loss_fn": nn.CrossEntropyLoss()},
        {"compute_loss": plain_loss, "weight": valid},
        {"compute_loss": lambda m, *batch: (plain_loss(m, *batch), valid(*batch))},
        {"compute_loss": lambda m, *batch: {"a": (plain_loss(m, *batch), valid(*batch))}},
    ],
    ids=["loss_fn", "weight", "(loss, weight)", "by name"],
)
def test_a_batch_in_which_nothing_counts_makes_no_update_on_any_device(keywords, device, monkeypatch):
    if device == "accelerator":  # where weights stay tensors, read when the window ends
        from gradaccum.torch.loss import named, objective

        for module in (named, objective):
            monkeypatch.setattr(module, "plain_weight", lambda weight: torch.as_tensor(weight))
    model = linear(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    step = step_of(model, optimizer, micro_batch_size=3, **keywords)
    assert step(randn(ROWS, 5), classes()).isfinite()
    before = [p.clone() for p in model.parameters()]
    assert step(randn(ROWS, 5), torch.full((ROWS,), -100)).isnan()
    assert step.updates == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert step(randn(ROWS, 5), classes()).isfinite()
    assert step.updates == 2


def test_a_micro_batch_of_weight_zero_may_have_a_loss_of_nan():
    def loss_and_weight(model, x, y):
        return token_mean(model, x, y), int(valid(x, y))

    data = [(randn(ROWS, 5), classes(ignored=-100))]
    assert_same_updates(linear(4), data, compute_loss=loss_and_weight, micro_batch_size=1)


def batch_hard(outputs, targets):
    distances = torch.cdist(outputs, outputs)
    same = targets[:, None] == targets[None, :]
    hardest_positive = (distances * same).max(1).values
    hardest_negative = distances.masked_fill(same, float("inf")).min(1).values
    return F.relu(hardest_positive - hardest_negative + 1.0).mean()


@pytest.mark.parametrize(
    ("loss_fn", "targets", "advice"),
    [
        (batch_hard, lambda: torch.arange(ROWS) % 3, "chunked"),
        (partial(F.mse_loss, reduction="sum"), lambda: randn(ROWS, 4), 'reduction="sum"'),
    ],
)
def test_losses_that_are_not_additive_are_refused_with_advice(loss_fn, targets, advice):
    model, batch = nn.Sequential(linear(4), nn.Dropout(0.5)), (randn(ROWS, 5), targets())
    step = step_of(model, loss_fn=lambda *outputs: loss_fn(*outputs), micro_batch_size=3, verify=True)
    with left_as_it_was(model, NotEquivalentError, advice):
        step(*batch)


def test_a_small_first_batch_does_not_speak_for_larger_ones():
    def rows_of_large_ones(model, x, y):
        return nn.functional.cross_entropy(model(x), y) / (1 if len(x) <= 2 else len(x))

    model = network()
    step = step_of(model, verify=True, compute_loss=rows_of_large_ones, micro_batch_size=4)
    step(*batches(2)[0])
    with pytest.raises(NotEquivalentError):
        step(*batches(13)[0])


def test_weights_that_do_not_add_up_are_refused():
    model = linear(2)
    step = step_of(model, loss_fn=nn.MSELoss(), weight=lambda x, y: 1.0, micro_batch_size=3, verify=True)
    with pytest.raises(NotEquivalentError, match="weighed by what `weight` returns. Leave `weight` out"):
        step(randn(ROWS, 5), randn(ROWS, 2))


@pytest.mark.parametrize("shape", [(12,), (12, 1), (12, 2)])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "loss",
    [
        *(lambda weight, kind=kind: kind(weight=weight) for kind in (nn.BCEWithLogitsLoss, nn.BCELoss)),
        lambda weight: nn.BCEWithLogitsLoss(pos_weight=weight),
        lambda weight: partial(F.binary_cross_entropy_with_logits, weight=weight),
    ],
    ids=["BCEWithLogitsLoss", "BCELoss", "pos_weight", "function"],
)
def test_a_weight_for_each_row_that_the_loss_holds_is_refused_by_name(loss, shape, nested):
    columns = shape[1] if len(shape) > 1 else 1
    model = nn.Sequential(nn.Linear(3, columns), nn.Sigmoid(), *([nn.Flatten(0)] if len(shape) == 1 else []))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = step_of(model, optimizer, loss_fn=loss(torch.rand(shape)), micro_batch_size=4, verify=True)
    targets = torch.rand(12) if len(shape) == 1 else torch.rand(12, columns)
    with pytest.raises(ValueError, match="weight for each of 12 rows, and was given 4 rows"):
        step(torch.randn(12, 3), (targets,) if nested else targets)


def test_a_loss_of_one_value_per_row_and_a_reduction_that_contradicts_are_refused():
    with pytest.raises(ValueError, match="reduction='none'"):
        step_of(linear(2), loss_fn=nn.MSELoss(reduction="none"))
    with pytest.raises(ValueError, match="must be a scalar"):
        step_of(linear(2), compute_loss=lambda model, x: model(x).mean(1), verify=True)(randn(ROWS, 5))
    with pytest.raises(ValueError, match="contradicts"):
        step_of(linear(2), loss_fn=nn.MSELoss(), reduction="sum")


class Experts(nn.Module):
    """Rows of each kind go through an expert of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(5, 5, dtype=torch.float64) for _ in range(2))
        self.experts = nn.ModuleList(nn.Linear(5, 4, dtype=torch.float64) for _ in range(3))

    def forward(self, x, kinds):
        for block in self.blocks:
            x = torch.tanh(block(x))
        outputs = x.new_zeros(len(x), 4)
        for kind, expert in enumerate(self.experts):
            if (mine := kinds == kind).any():
                outputs[mine] = expert(x[mine])
        return outputs


def _mean(model: nn.Module, x, kinds, y):
    return F.cross_entropy(model(x, kinds), y)


def _count(x, kinds, y):
    return (y != -100).sum()


@pytest.mark.parametrize("blocks", [None, "blocks"])
@pytest.mark.parametrize(
    "how",
    [
        {"compute_loss": _mean, "weight": _count},
        {"compute_loss": lambda *batch: (_mean(*batch), _count(*batch[1:]))},
        {"compute_loss": lambda *batch: {"tokens": (_mean(*batch), _count(*batch[1:]))}},
        {
            "compute_loss": lambda *batch: {"tokens": _mean(*batch)},
            "weight": lambda *batch: {"tokens": _count(*batch)},
        },
    ],
)
def test_parameters_that_only_rows_of_weight_0_lead_to_are_updated_as_by_the_large_batch(how, blocks) -> None:
    kinds, y = torch.tensor([0, 0, 1, 1]), torch.tensor([1, 2, -100, -100])
    model, large = Experts(), Experts()
    step = TrainStep(model, torch.optim.AdamW(model.parameters()), micro_batch_size=2, blocks=blocks, **how)
    plain = torch.optim.AdamW(large.parameters())
    for _ in range(2):
        x = randn(4, 5)
        step(x, kinds, y)
        plain.zero_grad()
        _mean(large, x, kinds, y).backward()
        plain.step()
        for mine, theirs in zip(model.parameters(), large.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)  # nothing leads to the third expert
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
