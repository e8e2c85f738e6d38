"""Whatever a loss divides by, the micro-batches add up to the large batch's loss and update."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradaccum import NotEquivalentError
from gradaccum.torch import TrainStep
from tests.torch.train_step.test_train_step import OPTIMIZERS, assert_same_updates, batches, network, step_of

ROWS = 11


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def linear(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, outputs, dtype=torch.float64)


class Several(nn.Module):
    """A model with a tuple of outputs."""

    def __init__(self, *widths: int, positive: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(5, width, dtype=torch.float64) for width in widths)
        self.positive = positive

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outputs = [head(x) for head in self.heads]
        if self.positive:
            outputs[-1] = outputs[-1].exp()
        return tuple(outputs)


def classes(*shape: int, count: int = 4, ignored: int | None = None) -> Tensor:
    targets = torch.randint(0, count, (ROWS, *shape))
    if ignored is not None:
        targets[torch.rand(targets.shape) < 0.4] = ignored
        targets[:3] = ignored  # whole micro-batches with nothing but ignored targets
    return targets


def log_softmax() -> nn.Module:
    return nn.Sequential(linear(4), nn.LogSoftmax(-1))


class Frames(nn.Module):
    """Log-probabilities of 6 frames, as CTCLoss wants them: (frames, rows, classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear(6 * 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).reshape(-1, 6, 4).log_softmax(-1).transpose(0, 1)


def ctc_targets() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randint(1, 4, (ROWS, 3)), torch.full((ROWS,), 6), torch.randint(1, 4, (ROWS,))


def positions() -> nn.Module:
    return nn.Sequential(linear(4 * 6), nn.Unflatten(1, (4, 6)))


def signs() -> Tensor:
    return torch.randint(0, 2, (ROWS,)) * 2.0 - 1.0


CLASS_WEIGHTS = torch.tensor([0.2, 3.0, 1.0, 0.7], dtype=torch.float64)

# name: (loss with a reduction, model, targets)
LOSSES: dict[str, tuple[Callable[..., Any], Callable[[], nn.Module], Callable[[], Any]]] = {
    "L1": (nn.L1Loss, lambda: linear(2), lambda: randn(ROWS, 2)),
    "MSE": (nn.MSELoss, lambda: linear(2), lambda: randn(ROWS, 2)),
    "Huber": (nn.HuberLoss, lambda: linear(2), lambda: randn(ROWS, 2)),
    "SmoothL1": (nn.SmoothL1Loss, lambda: linear(2), lambda: randn(ROWS, 2)),
    "CrossEntropy": (nn.CrossEntropyLoss, lambda: linear(4), classes),
    "CrossEntropy, class weights": (
        functools.partial(nn.CrossEntropyLoss, weight=CLASS_WEIGHTS),
        lambda: linear(4),
        classes,
    ),
    "CrossEntropy, ignored": (nn.CrossEntropyLoss, lambda: linear(4), lambda: classes(ignored=-100)),
    "CrossEntropy, smooth, weights, ignored": (
        functools.partial(nn.CrossEntropyLoss, weight=CLASS_WEIGHTS, ignore_index=1, label_smoothing=0.1),
        lambda: linear(4),
        lambda: classes(ignored=1),
    ),
    "CrossEntropy, positions": (nn.CrossEntropyLoss, positions, lambda: classes(6, ignored=-100)),
    "CrossEntropy, positions, smooth": (
        functools.partial(nn.CrossEntropyLoss, label_smoothing=0.2),
        positions,
        lambda: classes(6, ignored=-100),
    ),
    "CrossEntropy, probabilities": (
        functools.partial(nn.CrossEntropyLoss, weight=CLASS_WEIGHTS, label_smoothing=0.1),
        lambda: linear(4),
        lambda: randn(ROWS, 4).softmax(-1),
    ),
    "NLL": (functools.partial(nn.NLLLoss, weight=CLASS_WEIGHTS), log_softmax, lambda: classes(ignored=-100)),
    "CTC": (functools.partial(nn.CTCLoss, zero_infinity=True), Frames, ctc_targets),
    "PoissonNLL": (nn.PoissonNLLLoss, lambda: linear(2), lambda: randn(ROWS, 2).exp()),
    "GaussianNLL": (nn.GaussianNLLLoss, lambda: linear(2), lambda: (randn(ROWS, 2), randn(ROWS, 2).exp())),
    "KLDiv": (nn.KLDivLoss, log_softmax, lambda: randn(ROWS, 4).softmax(-1)),
    "BCE": (nn.BCELoss, lambda: nn.Sequential(linear(2), nn.Sigmoid()), lambda: randn(ROWS, 2).sigmoid()),
    "BCEWithLogits": (
        functools.partial(nn.BCEWithLogitsLoss, pos_weight=torch.tensor([2.0, 5.0], dtype=torch.float64)),
        lambda: linear(2),
        lambda: torch.randint(0, 2, (ROWS, 2)).double(),
    ),
    "MarginRanking": (nn.MarginRankingLoss, lambda: Several(1, 1), lambda: signs()[:, None]),
    "HingeEmbedding": (nn.HingeEmbeddingLoss, lambda: linear(1), lambda: signs()[:, None]),
    "MultiLabelMargin": (
        nn.MultiLabelMarginLoss,
        lambda: linear(4),
        lambda: torch.cat([classes(1), torch.full((ROWS, 3), -1)], 1),
    ),
    "SoftMargin": (nn.SoftMarginLoss, lambda: linear(1), lambda: signs()[:, None]),
    "MultiLabelSoftMargin": (
        functools.partial(nn.MultiLabelSoftMarginLoss, weight=CLASS_WEIGHTS),
        lambda: linear(4),
        lambda: torch.randint(0, 2, (ROWS, 4)).double(),
    ),
    "CosineEmbedding": (nn.CosineEmbeddingLoss, lambda: Several(3, 3), signs),
    "MultiMargin": (functools.partial(nn.MultiMarginLoss, weight=CLASS_WEIGHTS), lambda: linear(4), classes),
    "TripletMargin": (nn.TripletMarginLoss, lambda: Several(3, 3, 3), lambda: ()),
    "TripletMarginWithDistance": (nn.TripletMarginWithDistanceLoss, lambda: Several(3, 3, 3), lambda: ()),
}


def same_updates(loss_fn: Any, model: nn.Module, targets: Callable[[], Any], size: int = 3, **keywords: Any) -> None:
    torch.manual_seed(3)
    data = [(randn(ROWS, 5), targets()) for _ in range(2)]

    def plain(model: nn.Module, x: Tensor, y: Any) -> Tensor:
        outputs = model(x)
        return loss_fn(*(outputs if isinstance(outputs, tuple) else (outputs,)), *(y if isinstance(y, tuple) else (y,)))

    assert_same_updates(model, data, plain, loss_fn=loss_fn, micro_batch_size=size, **keywords)


SUMS = ("L1", "CrossEntropy, smooth, weights, ignored", "CTC", "KLDiv", "TripletMargin")
"""What divides by nothing is weighed alike: one of each kind of outputs and targets."""


@pytest.mark.parametrize(
    ("name", "reduction"),
    [
        *((name, "mean") for name in LOSSES),
        *(pytest.param(name, "sum", marks=[] if name in SUMS else pytest.mark.slow) for name in LOSSES),
    ],
)
def test_every_torch_loss_is_weighed_by_what_it_divides_by(name: str, reduction: str) -> None:
    make, model, targets = LOSSES[name]
    if name == "KLDiv" and reduction == "mean":
        reduction = "batchmean"  # torch warns about "mean"; the test below has it
    same_updates(make(reduction=reduction), model(), targets)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
def test_kl_divergence_may_be_a_mean_over_elements() -> None:
    loss_fn = nn.KLDivLoss(reduction="mean", log_target=True)
    same_updates(loss_fn, log_softmax(), lambda: randn(ROWS, 4).log_softmax(-1))


def test_every_loss_of_torch_nn_is_in_the_table() -> None:
    table = {type(make(reduction="sum")).__name__ for make, _, _ in LOSSES.values()}
    there = {name for name in vars(nn) if name.endswith("Loss")}
    left_out = {"AdaptiveLogSoftmaxWithLoss", "LinearCrossEntropyLoss"}  # with parameters: they are tested below
    assert there - left_out <= table


def test_losses_with_parameters_of_their_own() -> None:
    torch.manual_seed(0)
    adaptive = nn.AdaptiveLogSoftmaxWithLoss(6, 10, cutoffs=[2, 6], div_value=2.0).double()
    model = linear(6)
    keywords: dict[str, Any] = {"loss_fn": adaptive, "micro_batch_size": 3}
    data = [(randn(ROWS, 5), classes(count=10))]
    assert_same_updates(model, data, lambda model, x, y: adaptive(model(x), y).loss, **keywords)
    if hasattr(nn, "LinearCrossEntropyLoss"):
        linear_loss = nn.LinearCrossEntropyLoss(6, 10, dtype=torch.float64)
        same_updates(linear_loss, linear(6), lambda: classes(count=10, ignored=-100))


@pytest.mark.parametrize(
    "loss_fn",
    [F.cross_entropy, functools.partial(F.cross_entropy, weight=CLASS_WEIGHTS), functools.partial(F.nll_loss)],
)
def test_functional_losses_are_known_too(loss_fn: Any) -> None:
    same_updates(loss_fn, log_softmax(), lambda: classes(ignored=-100))


class WithTargets(nn.Module):
    """Returns its targets beside its outputs, so that the batch says nothing about them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, batch: Any) -> tuple[Any, Any]:
        x, y = batch["x"], batch["y"]
        return self.inner(x), y


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("shape", ["a tuple", "from the model"])
@pytest.mark.parametrize("targets", ["indices", "probabilities"])
def test_targets_are_known_wherever_they_come_from(shape: str, targets: str, verify: bool) -> None:
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64))
    data: list[Any] = []
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
        assert_same_updates(WithTargets(), data, lambda model, x: loss_fn(*model(x)), **keywords)


def test_functional_sums_are_sums() -> None:
    same_updates(functools.partial(F.mse_loss, reduction="sum"), linear(2), lambda: randn(ROWS, 2))


def token_mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    mask = y != -100
    losses = F.cross_entropy(model(x), y, ignore_index=-100, reduction="none")
    return (losses * mask).sum() / mask.sum()


def token_data() -> list[tuple[Any, ...]]:
    torch.manual_seed(3)
    return [(randn(ROWS, 5), classes(6, ignored=-100)) for _ in range(2)]


def test_a_weight_function_says_what_the_mean_is_over() -> None:
    assert_same_updates(
        positions(),
        token_data(),
        token_mean,
        compute_loss=token_mean,
        weight=lambda x, y: (y != -100).sum(),
        micro_batch_size=2,
    )


def test_compute_loss_may_return_the_weight() -> None:
    for count in (lambda y: (y != -100).sum(), lambda y: int((y != -100).sum())):
        assert_same_updates(
            positions(),
            token_data(),
            token_mean,
            compute_loss=lambda model, x, y, count=count: (token_mean(model, x, y), count(y)),
            micro_batch_size=2,
        )


def test_sums_are_divided_by_the_weights_where_there_are_any() -> None:
    def token_sum(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, ignore_index=-100, reduction="sum")

    def counted(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        return token_sum(model, x, y), (y != -100).sum()

    data = token_data()
    assert_same_updates(positions(), data, token_sum, compute_loss=token_sum, reduction="sum", micro_batch_size=2)
    for keywords in (
        {"compute_loss": counted},
        {"compute_loss": token_sum, "weight": lambda x, y: (y != -100).sum()},
    ):
        assert_same_updates(positions(), data, token_mean, reduction="sum", micro_batch_size=2, **keywords)


def test_a_regulariser_is_exact_beside_a_mean_and_refused_beside_a_sum() -> None:
    def penalty(model: nn.Module) -> Tensor:
        return 0.1 * sum((p**2).sum() for p in model.parameters())

    data = [(randn(ROWS, 5), randn(ROWS, 2)) for _ in range(2)]

    def mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), y) + penalty(model)

    assert_same_updates(linear(2), data, mean, compute_loss=mean, micro_batch_size=3)

    def total(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), y, reduction="sum") + penalty(model)

    model = linear(2)
    step = TrainStep(model, OPTIMIZERS["sgd"](model.parameters()), compute_loss=total, reduction="sum")
    with pytest.raises(NotEquivalentError, match="regulariser"):
        step(*data[0])
    # Its share of the rows makes it additive.
    assert_same_updates(
        linear(2),
        data,
        total,
        compute_loss=lambda model, x, y: F.mse_loss(model(x), y, reduction="sum") + penalty(model) * len(x) / ROWS,
        reduction="sum",
        micro_batch_size=3,
    )


def ignored_mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.CrossEntropyLoss()(model(x), y)


@pytest.mark.parametrize("device", ["cpu", "accelerator"])
@pytest.mark.parametrize(
    "keywords",
    [
        {"loss_fn": nn.CrossEntropyLoss()},
        {"compute_loss": ignored_mean, "weight": lambda x, y: (y != -100).sum()},
        {"compute_loss": lambda *batch: (ignored_mean(*batch), (batch[-1] != -100).sum())},
        {"compute_loss": lambda *batch: {"a": (ignored_mean(*batch), (batch[-1] != -100).sum())}},
    ],
    ids=["loss_fn", "weight", "(loss, weight)", "by name"],
)
def test_a_batch_in_which_nothing_counts_makes_no_update_on_any_device(
    keywords: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "accelerator":  # where weights stay tensors, read when the window ends
        from gradaccum.torch.loss import named, objective

        for module in (named, objective):
            monkeypatch.setattr(module, "plain_weight", lambda weight: torch.as_tensor(weight))
    model = linear(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    step = TrainStep(model, optimizer, micro_batch_size=3, verify=False, **keywords)
    assert step(randn(ROWS, 5), classes()).isfinite()
    before = [p.clone() for p in model.parameters()]
    assert step(randn(ROWS, 5), torch.full((ROWS,), -100)).isnan()
    assert step.updates == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert step(randn(ROWS, 5), classes()).isfinite()
    assert step.updates == 2


def test_a_micro_batch_of_weight_zero_may_have_a_loss_of_nan() -> None:
    def compute_loss(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        mask = y != -100
        return (F.cross_entropy(model(x), y, reduction="none") * mask).sum() / mask.sum(), int(mask.sum())

    data = [(randn(ROWS, 5), classes(ignored=-100))]
    assert_same_updates(
        linear(4),
        data,
        lambda model, x, y: nn.CrossEntropyLoss()(model(x), y),
        compute_loss=compute_loss,
        micro_batch_size=1,
    )


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    outputs = F.normalize(outputs)
    return F.cross_entropy(outputs @ F.normalize(targets).T / 0.1, torch.arange(len(outputs)))


def dice(outputs: Tensor, targets: Tensor) -> Tensor:
    probabilities = outputs.sigmoid()
    return 1 - 2 * (probabilities * targets).sum() / (probabilities.sum() + targets.sum())


def batch_hard(outputs: Tensor, targets: Tensor) -> Tensor:
    distances = torch.cdist(outputs, outputs)
    same = targets[:, None] == targets[None, :]
    hardest_positive = (distances * same).max(1).values
    hardest_negative = distances.masked_fill(same, float("inf")).min(1).values
    return F.relu(hardest_positive - hardest_negative + 1.0).mean()


@pytest.mark.parametrize(
    ("loss_fn", "targets", "advice"),
    [
        (contrastive, lambda: randn(ROWS, 4), "chunked"),
        (dice, lambda: torch.randint(0, 2, (ROWS, 4)).double(), "chunked"),
        (batch_hard, lambda: torch.arange(ROWS) % 3, "chunked"),
        (
            lambda outputs, targets: F.mse_loss(outputs, targets, reduction="sum"),
            lambda: randn(ROWS, 4),
            'reduction="sum"',
        ),
    ],
)
def test_losses_that_are_not_additive_are_refused_with_advice(loss_fn: Any, targets: Any, advice: str) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(linear(4), nn.Dropout(0.5))
    before = [p.clone() for p in model.parameters()]
    step = TrainStep(model, OPTIMIZERS["sgd"](model.parameters()), loss_fn=loss_fn, micro_batch_size=3)
    with pytest.raises(NotEquivalentError) as raised:
        step(randn(ROWS, 5), targets())
    assert advice in str(raised.value)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_token_means_weighed_by_rows_are_refused() -> None:
    model = positions()
    step = TrainStep(model, OPTIMIZERS["sgd"](model.parameters()), compute_loss=token_mean, micro_batch_size=3)
    with pytest.raises(NotEquivalentError, match="weight=lambda"):
        step(*token_data()[0])


def test_a_small_first_batch_does_not_speak_for_larger_ones() -> None:
    def rows_of_large_ones(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y) / (1 if len(x) <= 2 else len(x))

    model = network()
    step = TrainStep(model, OPTIMIZERS["sgd"](model.parameters()), compute_loss=rows_of_large_ones, micro_batch_size=4)
    step(*batches(2)[0])
    with pytest.raises(NotEquivalentError):
        step(*batches(13)[0])


def test_weights_that_do_not_add_up_are_refused() -> None:
    model = linear(2)
    step = step_of(model, loss_fn=nn.MSELoss(), weight=lambda x, y: 1.0, micro_batch_size=3, verify=True)
    with pytest.raises(NotEquivalentError, match="weighed by what `weight` returns. Leave `weight` out"):
        step(randn(ROWS, 5), randn(ROWS, 2))


def test_verification_moves_nothing_and_is_not_tripped_by_dropout_or_batch_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(linear(4), nn.BatchNorm1d(4, dtype=torch.float64), nn.Dropout(0.5), nn.Dropout(0.5))
    model[3].eval()
    results = []
    for verify in (True, False):
        torch.manual_seed(5)
        step = TrainStep(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            loss_fn=nn.MSELoss(),
            micro_batch_size=4,
            verify=verify,
            batch_norm="micro",
        )
        model[1].reset_running_stats()
        step(randn(ROWS, 5), randn(ROWS, 4))
        results.append((torch.get_rng_state(), model[1].running_mean.clone(), model[1].num_batches_tracked.item()))
    assert [module.training for module in model] == [True, True, True, False]
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2] == 3


def test_the_first_and_the_second_update_are_verified_and_not_the_third() -> None:
    calls: list[int] = []
    model = linear(4)
    model.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    step = TrainStep(model, OPTIMIZERS["sgd"](model.parameters()), loss_fn=nn.MSELoss(), micro_batch_size=4)
    counts = []
    for _ in range(3):
        calls.clear()
        step(randn(ROWS, 5), randn(ROWS, 4))
        counts.append(len(calls))
    assert counts[0] == counts[1] == 3 + 4  # at once, and in three parts
    assert counts[2] == 3


@pytest.mark.parametrize("shape", [(12,), (12, 1), (12, 2)])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "loss",
    [
        *(lambda weight, kind=kind: kind(weight=weight) for kind in (nn.BCEWithLogitsLoss, nn.BCELoss)),
        lambda weight: nn.BCEWithLogitsLoss(pos_weight=weight),
        lambda weight: functools.partial(F.binary_cross_entropy_with_logits, weight=weight),
    ],
    ids=["BCEWithLogitsLoss", "BCELoss", "pos_weight", "function"],
)
def test_a_weight_for_each_row_that_the_loss_holds_is_refused_by_name(loss: Any, shape: Any, nested: bool) -> None:
    columns = shape[1] if len(shape) > 1 else 1
    model = nn.Sequential(nn.Linear(3, columns), nn.Sigmoid(), *([nn.Flatten(0)] if len(shape) == 1 else []))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = step_of(model, optimizer, loss_fn=loss(torch.rand(shape)), micro_batch_size=4, verify=True)
    targets = torch.rand(12) if len(shape) == 1 else torch.rand(12, columns)
    with pytest.raises(ValueError, match="weight for each of 12 rows, and was given 4 rows"):
        step(torch.randn(12, 3), (targets,) if nested else targets)


def test_a_loss_of_one_value_per_row_is_refused() -> None:
    model = linear(2)
    with pytest.raises(ValueError, match="reduction='none'"):
        TrainStep(model, OPTIMIZERS["sgd"](model.parameters()), loss_fn=nn.MSELoss(reduction="none"))
    step = TrainStep(model, OPTIMIZERS["sgd"](model.parameters()), compute_loss=lambda model, x: model(x).mean(1))
    with pytest.raises(ValueError, match="must be a scalar"):
        step(randn(ROWS, 5))


def test_reductions_that_contradict_are_refused() -> None:
    model = linear(2)
    with pytest.raises(ValueError, match="contradicts"):
        TrainStep(model, OPTIMIZERS["sgd"](model.parameters()), loss_fn=nn.MSELoss(), reduction="sum")


class Experts(nn.Module):
    """Rows of each kind go through an expert of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(5, 5, dtype=torch.float64) for _ in range(2))
        self.experts = nn.ModuleList(nn.Linear(5, 4, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        outputs = x.new_zeros(len(x), 4)
        for kind, expert in enumerate(self.experts):
            if (mine := kinds == kind).any():
                outputs[mine] = expert(x[mine])
        return outputs


def _mean(model: nn.Module, x: Tensor, kinds: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x, kinds), y)


def _count(x: Tensor, kinds: Tensor, y: Tensor) -> Tensor:
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
def test_parameters_that_only_rows_of_weight_0_lead_to_are_updated_as_by_the_large_batch(how: Any, blocks: Any) -> None:
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
