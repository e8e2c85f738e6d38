"""Several losses, each with a denominator of its own: the update is that of their means over the large batch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum import NotEquivalentError
from gradaccum.torch import check_equivalence, combine_buffers
from gradaccum.torch.loss import Objective
from gradaccum.torch.measure.fake_memory import micro_batch_peak
from tests.reference import FLOAT64, relative_error
from tests.torch.train_step.problems import Of, randn
from tests.torch.train_step.steps import assert_same_updates, left_as_it_was, same, step_of, total

ROWS = 13


class Tagger(nn.Module):
    """A class for each token, and one for each row; maybe with rows counted, and a BatchNorm, before it."""

    def __init__(self, dropout=0.0, before=()):
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Sequential(*before)
        self.body = nn.Linear(5, 7, dtype=torch.float64)
        self.dropout = nn.Dropout(dropout)
        self.tokens, self.row = (nn.Linear(7, outputs, dtype=torch.float64) for outputs in (3, 2))

    def forward(self, x):
        hidden = self.dropout(self.body(self.before(x)).tanh())
        return self.tokens(hidden), self.row(hidden.mean(1))


def counts_rows(module, x):
    module.seen += len(x)
    return x


def normed():
    counted = Of(counts_rows, seen=torch.zeros(()))
    combine_buffers(counted, seen="sum")
    return Tagger(before=[counted, nn.BatchNorm1d(4, dtype=torch.float64)])


def batches(count=3, rows=ROWS):
    """Tokens of which many are ignored, in whole rows too, and a class for some rows."""
    torch.manual_seed(1)
    data = []
    for _ in range(count):
        y, z = torch.randint(3, (rows, 4)), torch.randint(2, (rows,))
        y[torch.rand(rows, 4) < 0.4] = -100
        y[2:5] = -100  # a micro-batch of two rows without a token
        z[torch.rand(rows) < 0.5] = -100
        data.append((randn(rows, 4, 5), y, z))
    return data


def losses(model, x, y, z):
    tokens, row = model(x)
    return {
        "tokens": (F.cross_entropy(tokens.transpose(1, 2), y), (y != -100).sum()),  # 0 / 0 where there is none
        "row": (0.5 * F.cross_entropy(row, z), int((z != -100).sum())),
        "z": (1e-2 * tokens.logsumexp(-1).square().mean(), len(x)),
    }


def counts(x, y, z):
    return {"tokens": (y != -100).sum(), "row": (z != -100).sum(), "z": len(x)}


def summed(model, x, y, z):
    tokens, row = model(x)
    return {
        "tokens": (F.cross_entropy(tokens.transpose(1, 2), y, reduction="sum"), (y != -100).sum()),
        "row": (F.cross_entropy(row, z, reduction="sum"), (z != -100).sum()),
    }


def penalised(model, x, y, z):
    x = x.detach().requires_grad_()
    tokens = model(x)[0]
    (slope,) = torch.autograd.grad(tokens.square().sum(), x, create_graph=True)
    return {"tokens": losses(model, x, y, z)["tokens"], "penalty": (slope.square().mean(), len(x))}


def alone(*batch):
    return {name: loss for name, (loss, _) in losses(*batch).items()}


BY_BATCH = {"compute_loss": alone, "weight": counts}


def test_the_update_is_that_of_the_means_with_gradients_of_their_own():
    assert_same_updates(Tagger(), batches(), terms=penalised)


@pytest.mark.parametrize("model", [lambda: Tagger(0.5), normed], ids=["dropout", "buffers"])
@pytest.mark.parametrize("batch_norm", ["micro", "pooled", "frozen"])
def test_counting_leaves_random_numbers_and_buffers_as_they_were(model, batch_norm):
    """As where nothing has to be counted."""
    outcomes = []
    for how in ({"compute_loss": losses}, BY_BATCH):
        own = model()
        step = step_of(own, "adam", micro_batch_size=4, batch_norm=batch_norm, verify=True, **how)
        torch.manual_seed(7)
        outcomes.append([*(step(*batch) for batch in batches()), torch.rand(3), *own.state_dict().values()])
        assert len(own.before) == 0 or own.before[0].seen == 3 * ROWS
    assert same(*outcomes)


def test_a_micro_batch_of_all_rows_needs_no_counting_pass():
    seen = []
    for size, passes in ((64, 1), (7, 4)):
        model = Tagger()
        step = step_of(model, compute_loss=losses, micro_batch_size=size)
        step(*batches()[0])  # finds out that there are several
        model.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
        step(*batches()[1])
        assert seen == [False] * (passes // 2) + [True] * (passes - passes // 2)
        seen.clear()


def test_weights_that_are_drawn_in_the_forward_pass():
    def masked(model, x, y, z):
        counts = torch.rand(y.shape) < 0.5
        found = F.cross_entropy(model(x)[0].transpose(1, 2), y.clamp(min=0), reduction="none")
        return {"drawn": ((found * counts).sum() / counts.sum(), counts.sum()), "z": losses(model, x, y, z)["z"]}

    def in_parts(model, *batch):
        torch.manual_seed(3)
        parts = [masked(model, *(t[rows] for t in batch)) for rows in (slice(0, 5), slice(5, 9), slice(9, 13))]
        pairs = [[part[name] for part in parts] for name in ("drawn", "z")]
        means = [sum(loss * weight for loss, weight in found) / sum(w for _, w in found) for found in pairs]
        return {"drawn": (means[0], 1), "z": (means[1], 1)}

    model = Tagger()
    reference, batch = copy.deepcopy(model), batches()[0]
    step = step_of(model, torch.optim.SGD(model.parameters(), lr=0.1), compute_loss=masked, micro_batch_size=5)
    torch.manual_seed(3)
    step(*batch)
    total(in_parts)(reference, *batch).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert relative_error(model.parameters(), reference.parameters()) <= FLOAT64


def test_weights_that_change_from_pass_to_pass_are_refused():
    calls, model, batch = [], Tagger(), batches()[0]

    def fickle(model, x, y, z):
        calls.append(len(x))
        return {"tokens": (model(x)[0].mean(), len(calls)), "z": (model(x)[0].square().mean(), len(x))}

    with left_as_it_was(model, ValueError, "weights of the loss term 'tokens' add up to"):
        step_of(model, compute_loss=fickle, micro_batch_size=4)(*batch)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("terms", [summed, lambda *batch: summed(*batch)["tokens"]], ids=["by name", "(loss, weight)"])
def test_weights_that_are_tensors_are_predicted_with_on_fake_tensors(terms):
    objective = Objective(Tagger(), compute_loss=terms)
    assert micro_batch_peak(objective, objective.batch(batches()[0]), 4, gathered={}) > 0  # as for a sharded model


def test_the_proof_and_the_check_name_the_term_whose_weight_is_wrong():
    x, y, z = batches(rows=16)[0]
    y = torch.where(torch.arange(16)[:, None] % 3 == 0, y.clamp(min=0), y.index_fill(0, torch.arange(2, 5), 1))
    batch = x, y, z.clamp(min=0)

    def by_rows(model, x, y, z):  # also the tokens' mean
        found = losses(model, x, y, z)
        return {**found, "tokens": (found["tokens"][0], len(x))}

    assert check_equivalence(Tagger(), batch, compute_loss=losses).raise_if_different().max_error <= FLOAT64
    assert check_equivalence(Tagger(), batch, **BY_BATCH).ok
    assert check_equivalence(Tagger(dropout=0.5), batch, compute_loss=losses).ok
    result = check_equivalence(Tagger(), batch, compute_loss=by_rows)
    assert not result.ok
    assert [cause.message.split(":")[0] for cause in result.causes] == ["Of the loss term 'tokens'"]
    assert "mean over" in result.causes[0].message
    with pytest.raises(NotEquivalentError, match="Of the loss term 'tokens'"):
        step_of(Tagger(), verify=True, compute_loss=by_rows, micro_batch_size=4)(*batch)
