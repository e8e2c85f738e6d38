"""Several losses, each with a denominator of its own: the update is that of their means over the large batch."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum import NotEquivalentError
from gradaccum.torch import TrainStep, check_equivalence, combine_buffers
from gradaccum.torch.loss import Objective
from gradaccum.torch.measure.fake_memory import micro_batch_peak
from tests.reference import FLOAT64, relative_error
from tests.torch.train_step.test_memory import Fragile
from tests.torch.train_step.test_padding import Attention, text, token_mean, valid
from tests.torch.train_step.test_train_step import OPTIMIZERS, assert_same_updates, by_hand, step_of
from tests.torch.train_step.test_train_step import batches as rows_and_classes

ROWS = 13


class Tagger(nn.Module):
    """A class for each token, and one for each row."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(5, 7, dtype=torch.float64)
        self.dropout = nn.Dropout(dropout)
        self.tokens, self.row = (nn.Linear(7, outputs, dtype=torch.float64) for outputs in (3, 2))

    def forward(self, x):
        hidden = self.dropout(self.body(x).tanh())
        return self.tokens(hidden), self.row(hidden.mean(1))


def batches(count=3, rows=ROWS):
    """Tokens of which many are ignored, in whole rows too, and a class for some rows."""
    torch.manual_seed(1)
    data = []
    for _ in range(count):
        y, z = torch.randint(3, (rows, 4)), torch.randint(2, (rows,))
        y[torch.rand(rows, 4) < 0.4] = -100
        y[2:5] = -100  # a micro-batch of two rows without a token
        z[torch.rand(rows) < 0.5] = -100
        data.append((torch.randn(rows, 4, 5, dtype=torch.float64), y, z))
    return data


def losses(model, x, y, z):
    tokens, row = model(x)
    return {
        "tokens": (F.cross_entropy(tokens.transpose(1, 2), y), (y != -100).sum()),  # 0 / 0 where there is none
        "row": (0.5 * F.cross_entropy(row, z), int((z != -100).sum())),
        "z": (1e-2 * tokens.logsumexp(-1).square().mean(), len(x)),
    }


def total(terms):
    """The loss of all rows that has these terms."""
    return lambda *batch: sum(loss for loss, _ in terms(*batch).values())


large = total(losses)


def counts(x, y, z):
    return {"tokens": (y != -100).sum(), "row": (z != -100).sum(), "z": len(x)}


def alone(model, *batch):
    return {name: loss for name, (loss, _) in losses(model, *batch).items()}


def assert_same(model, data, plain=large, make="sgd", tolerance=FLOAT64, **keywords):
    """The parameters and the loss of ordinary steps, and each term's mean."""
    reference = copy.deepcopy(model)
    expected = by_hand(reference, data, plain, make)
    keywords = {"compute_loss": losses, **keywords}
    step = TrainStep(model, OPTIMIZERS.get(make, make)(model.parameters()), **keywords)
    found = []
    for batch in data:
        before = copy.deepcopy(model)
        found.append(step(*batch))
        if keywords["compute_loss"] in (losses, alone):
            means = {name: loss for name, (loss, _) in losses(before, *batch).items()}
            assert list(step.losses) == list(means)
            assert [mean.isnan() for mean in means.values()] == [mean.isnan() for mean in step.losses.values()]
            known = [(step.losses[name], mean) for name, mean in means.items() if not mean.isnan()]
            assert relative_error(*zip(*known, strict=True)) <= tolerance
            assert not any(mean.requires_grad or mean.dim() for mean in step.losses.values())
    assert relative_error(model.parameters(), reference.parameters()) <= tolerance
    assert relative_error([torch.stack(found)], [torch.stack(expected)]) <= tolerance
    return step


SLOW = [(size, False) for size in (2, 5)] + [(size, True) for size in (1, 2, 4, 13, "auto")]


@pytest.mark.parametrize(
    ("size", "told"),
    [(1, False), (4, False), (13, False), ("auto", False), (5, True)]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW],
)
def test_every_split_makes_the_sum_of_the_large_batchs_means(size, told):
    keywords = {"compute_loss": alone, "weight": counts} if told else {}
    for make in OPTIMIZERS:
        assert_same(Tagger(), batches(), make=make, micro_batch_size=size, **keywords)


def test_a_list_of_pairs_has_its_means_by_index():
    listed = {"compute_loss": lambda *batch: list(losses(*batch).values()), "micro_batch_size": 4}
    assert list(assert_same(Tagger(), batches(), **listed).losses) == [0, 1, 2]
    one = step_of(nn.Linear(5, 1), compute_loss=lambda m, x: m(x).mean(), verify=True)
    one(torch.randn(3, 5))
    assert one.losses == {}


def summed(model, x, y, z):
    tokens, row = model(x)
    return {
        "tokens": (F.cross_entropy(tokens.transpose(1, 2), y, reduction="sum"), (y != -100).sum()),
        "row": (F.cross_entropy(row, z, reduction="sum"), (z != -100).sum()),
    }


def test_sums_are_divided_each_by_its_own_total():
    def plain(*batch):
        return sum(loss / weight for loss, weight in summed(*batch).values())

    assert_same(Tagger(), batches(), plain, compute_loss=summed, reduction="sum", micro_batch_size=3)


def test_a_term_that_is_missing_somewhere_weighs_nothing_there():
    def some(model, x, y, z):
        found = losses(model, x, y, z)
        return {name: term for name, term in found.items() if term[1] > 0}

    assert_same(Tagger(), batches(), compute_loss=some, micro_batch_size=1)

    def told(x, y, z):
        return {name: count for name, count in counts(x, y, z).items() if count}

    def there(*batch):
        return {name: loss for name, (loss, _) in some(*batch).items()}

    assert_same(Tagger(), batches(), compute_loss=there, weight=told, micro_batch_size=1)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5, 13])
def test_a_micro_batch_in_which_all_terms_are_detached_adds_nothing(size, verify):
    """A metric for every row, and a loss for a few."""

    def rare(model, x, y, z):
        _, row = model(x)
        flagged = {"row": (F.cross_entropy(row, z), int((z != -100).sum()))} if (z != -100).any() else {}
        return {"metric": (row.detach().square().mean(), len(x)), **flagged}

    data = batches()
    for _, _, z in data:
        z[:11] = -100
        z[11:] = torch.tensor([1, 0])
    step = assert_same(Tagger(), data, total(rare), compute_loss=rare, micro_batch_size=size, verify=verify)
    assert list(step.losses) == ["metric", "row"]


@pytest.mark.parametrize("told", [False, True])
def test_a_term_of_total_weight_0_adds_nothing(told):
    keywords = {"compute_loss": alone, "weight": counts} if told else {"compute_loss": losses}
    data = [(x, y.fill_(-100), z) for x, y, z in batches()]

    def plain(model, *batch):
        return sum(loss for name, (loss, _) in losses(model, *batch).items() if name != "tokens")

    for size in (4, 13):
        step = assert_same(Tagger(), data, plain, micro_batch_size=size, **{**keywords, "verify": True})
        assert step.losses["tokens"].isnan()


def test_nothing_that_weighs_anything_is_no_update(caplog):
    model = Tagger()
    before = copy.deepcopy(model)
    step = step_of(
        model, compute_loss=lambda *batch: {"tokens": losses(*batch)["tokens"]}, micro_batch_size=4, verify=True
    )
    caplog.set_level("INFO", logger="gradaccum")
    x, y, z = batches()[0]
    assert step(x, y.fill_(-100), z).isnan()
    assert step.losses["tokens"].isnan()
    assert step.updates == 0
    assert "No update: the total weight of this batch" in caplog.text
    assert relative_error(model.parameters(), before.parameters()) == 0


def test_counting_leaves_random_numbers_as_they_were():
    outcomes = []
    for keywords in ({"compute_loss": losses}, {"compute_loss": alone, "weight": counts}):
        model = Tagger(0.5)
        step = step_of(model, "adam", micro_batch_size=4, verify=True, **keywords)
        torch.manual_seed(7)
        outcomes.append([*(step(*batch) for batch in batches()), torch.rand(3), *model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += len(x)
        return x


combine_buffers(Counted, seen="sum")


class Normed(Tagger):
    """With a BatchNorm before it, and its rows counted."""

    def __init__(self):
        super().__init__()
        self.count, self.norm = Counted(), nn.BatchNorm1d(4, dtype=torch.float64)

    def forward(self, x):
        return super().forward(self.norm(self.count(x)))


@pytest.mark.parametrize("batch_norm", ["micro", "pooled", "frozen"])
def test_counting_moves_no_buffer(batch_norm):
    models = Normed(), Normed()
    for model, keywords in zip(models, ({"compute_loss": losses}, {"compute_loss": alone, "weight": counts})):
        step = step_of(model, micro_batch_size=4, batch_norm=batch_norm, verify=True, **keywords)
        for batch in batches():
            step(*batch)
    assert models[0].count.seen == 3 * ROWS
    assert relative_error(*(list(model.state_dict().values()) for model in models)) == 0


def masked(model, x, y, z):
    """Which tokens count is drawn in the forward pass."""
    counts = torch.rand(y.shape) < 0.5
    found = F.cross_entropy(model(x)[0].transpose(1, 2), y.clamp(min=0), reduction="none")
    return {"drawn": ((found * counts).sum() / counts.sum(), counts.sum()), "z": losses(model, x, y, z)["z"]}


def test_weights_that_are_drawn_in_the_forward_pass():
    model = Tagger()
    reference = copy.deepcopy(model)
    step = step_of(model, torch.optim.SGD(model.parameters(), lr=0.1), compute_loss=masked, micro_batch_size=5)
    batch = batches()[0]
    torch.manual_seed(3)
    step(*batch)
    torch.manual_seed(3)
    parts = [masked(reference, *(t[rows] for t in batch)) for rows in (slice(0, 5), slice(5, 9), slice(9, 13))]
    drawn = sum(part["drawn"][0] * part["drawn"][1] for part in parts) / sum(part["drawn"][1] for part in parts)
    rest = sum(part["z"][0] * part["z"][1] for part in parts) / ROWS
    (drawn + rest).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert relative_error(model.parameters(), reference.parameters()) <= FLOAT64


def test_weights_that_change_from_pass_to_pass_are_refused():
    calls = []

    def fickle(model, x, y, z):
        calls.append(len(x))
        return {"tokens": (model(x)[0].mean(), len(calls)), "z": (model(x)[0].square().mean(), len(x))}

    model = Tagger()
    step = step_of(model, compute_loss=fickle, micro_batch_size=4)
    with pytest.raises(ValueError, match="weights of the loss term 'tokens' add up to"):
        step(*batches()[0])
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("limits", [(3, 99), (99, 3)])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_running_out_of_memory_keeps_the_totals(limits, dropout):
    def terms(model, x, y):
        outputs = model(x)
        return {
            "ce": (F.cross_entropy(outputs, y, ignore_index=1), (y != 1).sum()),
            "z": (outputs.square().mean(), len(x)),
        }

    for size in (7, 13):
        model, reference = (Fragile(*fits, dropout=dropout).train(dropout == 0) for fits in (limits, (99, 99)))
        keywords = {"compute_loss": terms, "micro_batch_size": size, "verify": False}
        step = assert_same_updates(model, rows_and_classes(count=2), total(terms), reference=reference, **keywords)
        assert step.micro_batch_size <= 3


def test_a_micro_batch_of_all_rows_needs_no_counting_pass():
    seen = []
    for size, passes in ((64, 1), (7, 4)):
        model = Tagger()
        step = step_of(model, compute_loss=losses, micro_batch_size=size)
        step(*batches()[0])  # finds out that there are several
        model.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
        step(*batches()[1])
        assert len(seen) == passes
        assert seen == [False] * (passes // 2) + [True] * (passes - passes // 2)
        seen.clear()


def test_losses_with_gradients_of_their_own_are_counted_with_gradients():
    def penalised(model, x, y, z):
        x = x.detach().requires_grad_()
        tokens = model(x)[0]
        (slope,) = torch.autograd.grad(tokens.square().sum(), x, create_graph=True)
        return {"tokens": losses(model, x, y, z)["tokens"], "penalty": (slope.square().mean(), len(x))}

    assert_same(Tagger(), batches(), total(penalised), compute_loss=penalised, micro_batch_size=4)


def test_a_scaler_an_autocast_and_a_wider_sum():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert assert_same(Tagger(), batches(), scaler=scaler, micro_batch_size=4).updates == 3
    x, y, z = batches()[0]
    model = Tagger().to(torch.bfloat16)
    reference = copy.deepcopy(model).double()
    large(reference, x.bfloat16().double(), y, z).backward()
    wide = {"autocast": torch.bfloat16, "accumulate_dtype": torch.float32, "compute_loss": losses, "verify": True}
    step_of(model, torch.optim.SGD(model.parameters(), lr=0.0), micro_batch_size=2, **wide)(x.bfloat16(), y, z)
    assert relative_error([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()]) < 0.03


def test_lbfgs_evaluates_all_terms_each_time():
    lbfgs = functools.partial(torch.optim.LBFGS, max_iter=4)
    assert_same(Tagger(), batches(), make=lbfgs, tolerance=1e-9, micro_batch_size=5)


def test_exact_batch_norm_gives_the_terms_all_rows_at_once():
    assert_same(Normed(), batches(), micro_batch_size=4, batch_norm="exact")


def test_text_that_is_packed_by_tokens():
    def terms(model, batch):
        outputs = model(batch["input_ids"], batch["attention_mask"])
        found = (batch["attention_mask"] * outputs.logsumexp(-1).square()).sum(1).mean()
        return {"tokens": (token_mean(model, batch), valid(batch)), "z": (1e-2 * found, len(outputs))}

    data = [(text("right", seed),) for seed in range(3)]
    assert_same(Attention(), data, total(terms), compute_loss=terms, max_tokens=24)


def test_the_noise_scale_is_measured():
    model = Tagger()
    step = step_of(model, compute_loss=losses, micro_batch_size=4, noise_scale=True, verify=True)
    for batch in batches(count=6):
        step(*batch)
    assert step.noise_scale.value > 0


@pytest.mark.parametrize("terms", [summed, lambda *batch: summed(*batch)["tokens"]], ids=["by name", "(loss, weight)"])
def test_weights_that_are_tensors_are_predicted_with_on_fake_tensors(terms):
    objective = Objective(Tagger(), compute_loss=terms)
    assert micro_batch_peak(objective, objective.batch(batches()[0]), 4, gathered={}) > 0  # as for a sharded model


# What is refused.

WRONG = {
    "alone": (lambda m, x: {"a": (m(x).mean(), 1), "b": m(x).mean()}, "loss term 'b' comes without its weight"),
    "alone in a list": (lambda m, x: [m(x).mean(), m(x).mean()], "loss term 0 comes without its weight"),
    "negative": (lambda m, x: {"a": (m(x).mean(), -1)}, "loss term 'a': A weight must be a finite number >= 0"),
    "not finite": (lambda m, x: {"a": (m(x).mean(), float("nan"))}, "loss term 'a': A weight must be"),
    "no number": (lambda m, x: {"a": (m(x).mean(), "3")}, "loss term 'a': A weight must be"),
    "no tensor": (lambda m, x: {"a": (1.0, 3)}, "loss term 'a' must be a tensor"),
    "no scalar": (lambda m, x: {"a": (m(x), 3)}, "loss term 'a' must be a scalar"),
    "without": (lambda m, x: {"a": (m(x).mean(), None)}, "loss term 'a': A weight must be a finite number >= 0"),
    "a flag": (lambda m, x: {"a": (m(x).mean(), torch.tensor(True))}, "loss term 'a': A weight must be"),
    "differentiable": (
        lambda m, x: {"a": (m(x).mean(), m(x).exp().sum())},
        "'a': A weight must not require a gradient",
    ),
    "one differentiable": (lambda m, x: (m(x).mean(), m(x).exp().sum()), "A weight must not require a gradient"),
    "pairs in a tuple": (lambda m, x: ((m(x).mean(), 1), (m(x).mean(), 1)), "a tuple of 2 pairs"),
    "detached": (lambda m, x: {"a": (m(x).mean().detach(), 1)}, "None of the losses requires a gradient: 'a'"),
    "none": (lambda m, x: {}, "has no terms.*a weight of 0"),
    "sometimes": (lambda m, x: {"a": (m(x).mean(), 1)} if len(x) == 4 else m(x).mean(), "always or never"),
}


TOLD = {  # and with `weight`
    "a pair": (lambda m, x: {"a": (m(x).mean(), 1)}, "'a' comes as .loss, weight.", lambda x: {"a": 1}),
    "unknown": (lambda m, x: dict.fromkeys("ab", m(x).mean()), "no entry for the loss term 'b'", lambda x: {"a": 1}),
    "missing": (
        lambda m, x: {"a": m(x).mean()},
        "gives 2 for the loss term 'b'",
        lambda x: {"a": 1, "b": 2},
    ),
    "one loss": (lambda m, x: m(x).mean(), "`weight` names loss terms", lambda x: {"a": 1}),
    "one weight": (lambda m, x: {"a": m(x).mean()}, "a number for each of the loss terms", lambda x: 1),
    "told negative": (lambda m, x: {"a": m(x).mean()}, "loss term 'a': A weight must be", lambda x: {"a": -1}),
}


@pytest.mark.parametrize("case", [*WRONG, *TOLD])
def test_what_is_no_loss_with_its_weight_is_an_error_that_names_the_term(case):
    compute_loss, message, *weight = {**WRONG, **TOLD}[case]
    keywords = {"compute_loss": compute_loss, "micro_batch_size": 4, "weight": weight[0] if weight else None}
    with pytest.raises((TypeError, ValueError), match=message):
        step_of(nn.Linear(5, 1), **keywords)(torch.randn(7, 5))


def by_rows(model, x, y, z):
    """The tokens' mean with the wrong weight."""
    return {
        name: (loss, len(x) if name == "tokens" else weight) for name, (loss, weight) in losses(model, x, y, z).items()
    }


def uneven():
    x, y, z = batches(rows=16)[0]
    return (
        x,
        torch.where(torch.arange(16)[:, None] % 3 == 0, y.clamp(min=0), y.index_fill(0, torch.arange(2, 5), 1)),
        z.clamp(min=0),
    )


def test_the_proof_and_the_check_name_the_term_whose_weight_is_wrong():
    batch = uneven()
    assert check_equivalence(Tagger(), batch, compute_loss=losses).raise_if_different().max_error <= FLOAT64
    assert check_equivalence(Tagger(), batch, compute_loss=alone, weight=counts).ok
    assert check_equivalence(Tagger(dropout=0.5), batch, compute_loss=losses).ok
    result = check_equivalence(Tagger(), batch, compute_loss=by_rows)
    assert not result.ok
    assert [cause.message.split(":")[0] for cause in result.causes] == ["Of the loss term 'tokens'"]
    assert "mean over" in result.causes[0].message
    model = Tagger()
    step = step_of(model, verify=True, compute_loss=by_rows, micro_batch_size=4)
    with pytest.raises(NotEquivalentError, match="Of the loss term 'tokens'"):
        step(*batch)
