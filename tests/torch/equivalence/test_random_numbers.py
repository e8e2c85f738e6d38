"""Random numbers in the loss: each row's own in a proof, and named where every micro-batch draws the same again."""

import pytest
import torch
from torch import distributions, nn
from torch.nn import functional as F

from gradaccum import NotEquivalentError
from gradaccum.torch import TrainStep, check_equivalence
from tests.torch.equivalence.problems import seeded

X, Y = torch.randn(16, 6, generator=(same := seeded(5))), torch.randint(4, (16,), generator=same)

DRAWS = {
    "beta": lambda x: distributions.Beta(torch.full((len(x), 1), 0.4), 0.4).sample(),
    "one beta": lambda x: distributions.Beta(0.4, 0.4).sample(),
    "gamma": lambda x: distributions.Gamma(2.0, 1.0).sample((len(x), 1)),
    "dirichlet": lambda x: distributions.Dirichlet(torch.ones(len(x), 3)).sample()[:, :1],
    "poisson": lambda x: torch.poisson(torch.ones(len(x), 1)),
    "binomial": lambda x: torch.binomial(torch.full((len(x), 1), 4.0), torch.full((len(x), 1), 0.5)),
    "geometric": lambda x: torch.empty(len(x), 1).geometric_(0.5),
    "random": lambda x: torch.empty(len(x), 1).random_(4),
    "student": lambda x: distributions.StudentT(3.0).sample((len(x), 1)),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def step(loss):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainStep(model, optimizer, compute_loss=loss, micro_batch_size=4)(X, Y)


@pytest.mark.parametrize("name", DRAWS)
def test_what_distributions_draw_belongs_to_its_rows(name):
    def loss(model, x, y):
        return F.cross_entropy(model(x * (1 + 0.1 * DRAWS[name](x))), y)

    step(loss)
    assert check_equivalence(network(), (X.double(), Y), compute_loss=loss).max_error < 1e-9


@pytest.mark.parametrize("name", ["beta", "gamma", "dirichlet"])
def test_rows_that_a_permutation_mixes_are_refused_beside_what_distributions_draw(name):
    def loss(model, x, y):
        share = 1 / (1 + DRAWS[name](x))
        return F.cross_entropy(model(share * x + (1 - share) * x[torch.randperm(len(x))]), y)

    with pytest.raises(NotEquivalentError):
        step(loss)


def test_rows_that_a_permutation_mixes_are_refused_beside_numbers_that_belong_to_no_row():
    def loss(model, x, y):
        noise = torch.randn(3 * len(x) + 1).mean()
        return F.cross_entropy(model(x[torch.randperm(len(x))] + x + noise), y)

    with pytest.raises(NotEquivalentError):
        step(loss)


def of_its_own(x):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(5))


def of_the_default(x):
    torch.manual_seed(5)
    return torch.randn_like(x)


def in_a_fork(x):
    with torch.random.fork_rng():
        return torch.randn_like(x)


def in_a_seeded_fork(x):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return torch.randn_like(x)


KEPT = seeded(3)


def of_one_that_is_kept(x):
    return torch.randn(x.shape, generator=KEPT)


def of_one_that_is_seeded_again(x):
    KEPT.manual_seed(3)
    return torch.randn(x.shape, generator=KEPT)


REPEATED = [of_its_own, of_the_default, in_a_fork, in_a_seeded_fork, of_one_that_is_seeded_again]


@pytest.mark.parametrize("noise", REPEATED)
def test_numbers_that_each_micro_batch_draws_again_are_named(noise):
    def loss(model, x, y):
        return F.cross_entropy(model(x + noise(x)), y)

    with pytest.raises(NotEquivalentError, match="every micro-batch draws those of the first rows again"):
        step(loss)
    result = check_equivalence(network(), (X, Y), compute_loss=loss)
    assert [cause.kind for cause in result.causes] == ["randomness"]


@pytest.mark.parametrize("noise", [torch.randn_like, of_one_that_is_kept])
def test_numbers_that_go_on_are_those_of_their_rows(noise):
    step(lambda model, x, y: F.cross_entropy(model(x + noise(x)), y))


def test_a_number_that_all_rows_share_may_be_drawn_again():
    def loss(model, x, y):
        direction = torch.randn(6, generator=torch.Generator().manual_seed(5))
        return F.cross_entropy(model(x + direction), y)

    step(loss)
