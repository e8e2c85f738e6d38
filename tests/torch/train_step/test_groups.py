"""Rows that belong together are never split, and make the large batch's update."""

import functools

import pytest
import torch
from torch.nn import functional as F

from gradaccum import NotEquivalentError
from gradaccum.torch import check_equivalence
from tests.fuzz.problem import Faulty
from tests.reference import FLOAT64
from tests.torch.train_step.problems import network, randn
from tests.torch.train_step.steps import assert_same_updates, step_of

IDS = torch.tensor([11, 5, 7, 2, 30, 8, 9, 1]).repeat_interleave(torch.tensor([3, 1, 4, 2, 3, 4, 1, 2]))


def policy(limit=99):
    """The log-probability of each row, up to a number of rows."""
    model = network().append(Faulty())
    model[-1].most["forward"] = limit
    return model


def rows(count):
    torch.manual_seed(1)
    return [(randn(count, 5),) for _ in range(3)]


def answers(order=slice(None)):
    data = rows(len(IDS))
    return [(x, torch.rand(len(IDS), dtype=torch.float64), IDS[order]) for (x,) in data]


def dpo(model, x):
    """The preferred row of each pair, then the other."""
    log_probability = model(x).log_softmax(-1)[:, 0]
    return -F.logsigmoid(2 * (log_probability[0::2] - log_probability[1::2])).mean()


def negatives(model, x):
    """A query, its document, and two hard negatives."""
    query, *documents = model(x).unflatten(0, (-1, 4)).unbind(1)
    scores = torch.stack([(query * document).sum(-1) for document in documents], 1)
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))


def grpo(model, x, reward, prompt):
    """Advantages are normalised within the answers to a prompt."""
    together = (prompt[:, None] == prompt).to(reward.dtype)
    mean = together @ reward / together.sum(1)
    spread = (together @ reward.square() / together.sum(1) - mean.square()).clamp(min=0).sqrt()
    return -((reward - mean) / (spread + 1e-4) * model(x).log_softmax(-1)[:, 0]).mean()


def by_prompt(x, reward, prompt):
    return prompt


def terms(model, x):
    return {"dpo": (dpo(model, x), len(x) // 2), "z": (model(x).square().mean(), len(x))}


APART = torch.randperm(len(IDS), generator=torch.Generator().manual_seed(3))


def test_terms_and_groups_go_together():
    assert_same_updates(policy(), rows(26), terms=terms, micro_batch_size=6, groups=2)


@pytest.mark.parametrize(
    ("loss", "batch", "groups", "message"),
    [
        (dpo, rows(26)[0], None, "raises on micro-batches"),  # an odd number of rows is no pairs
        (grpo, answers()[0], None, "not additive"),
        (lambda model, x: dpo(model, x) + model(x).var(), rows(26)[0], 2, "not additive over rows"),
    ],
    ids=["dpo", "grpo", "beyond the groups"],
)
def test_a_loss_that_looks_beyond_rows_or_groups_is_refused(loss, batch, groups, message):
    with pytest.raises(NotEquivalentError, match=message):
        step_of(policy(), compute_loss=loss, micro_batch_size=6, verify=True, groups=groups)(*batch)
    result = check_equivalence(policy(), batch, compute_loss=loss, groups=groups)
    assert not result.ok
    assert loss is dpo or result.causes[0].kind == "loss"


@pytest.mark.parametrize("size", [None, 4, pytest.param(9, marks=pytest.mark.slow)])
def test_check_equivalence_cuts_between_groups(size):
    check = functools.partial(check_equivalence, policy(), micro_batch_size=size)
    found = check(answers(APART)[0], compute_loss=grpo, groups=by_prompt)
    assert found.raise_if_different().max_error <= FLOAT64
    assert check(rows(26)[0], compute_loss=dpo, groups=2).ok
    assert not check(answers(APART)[0], compute_loss=grpo).ok
    with pytest.raises(ValueError, match="at least 2 groups"):
        check(rows(26)[0], compute_loss=dpo, groups=26)


def test_a_group_that_does_not_fit_into_memory_is_named():
    step = step_of(policy(3), compute_loss=grpo, micro_batch_size=20, groups=IDS)
    with pytest.raises(torch.OutOfMemoryError, match=r"group (7|8) \(4 rows\), whose rows stay together"):
        step(*answers()[0])


def test_groups_too_large_to_be_proven_together_are_said_to_be(caplog):
    step = step_of(policy(9), verify=True, compute_loss=negatives, micro_batch_size=8, groups=4)
    step(*rows(28)[0])
    assert step.updates == 1
    assert "could not be proven: 12 rows of this batch" in caplog.text


def test_a_size_that_was_lowered_below_a_group_is_taken_from_a_checkpoint():
    first, second = (step_of(policy(4), compute_loss=grpo, micro_batch_size=5, groups=IDS) for _ in range(2))
    batch = answers()[0]
    expected = first(*batch)
    assert first.micro_batch_size < 4
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(second(*batch), expected)
