"""Rows that belong together are never split, and make the large batch's update."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum import NotEquivalentError
from gradaccum.torch import TrainStep, check_equivalence
from tests.reference import FLOAT64
from tests.torch.train_step.test_memory import OUT, Backward
from tests.torch.train_step.test_padding import Attention
from tests.torch.train_step.test_terms import total
from tests.torch.train_step.test_train_step import OPTIMIZERS, assert_same_updates, step_of

SIZES = [3, 1, 4, 2, 3, 4, 1, 2]
IDS = torch.repeat_interleave(torch.tensor([11, 5, 7, 2, 30, 8, 9, 1]), torch.tensor(SIZES))


class Policy(nn.Module):
    """The log-probability of each row, and which rows came together."""

    def __init__(self, forward_limit=99, backward_limit=99):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(5, 7, dtype=torch.float64), nn.Tanh(), nn.Linear(7, 3, dtype=torch.float64))
        self.limits = forward_limit, backward_limit
        self.sizes = []

    def forward(self, x):
        self.sizes.append(len(x))
        outputs = self.body(x)
        if len(x) > self.limits[0]:
            raise torch.OutOfMemoryError(OUT)
        return Backward.apply(outputs, self.limits[1])


def rows(count):
    torch.manual_seed(1)
    return [torch.randn(count, 5, dtype=torch.float64) for _ in range(3)]


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


def answers(order):
    count = len(IDS)
    torch.manual_seed(2)
    return [(x, torch.rand(count, dtype=torch.float64), IDS[order]) for x in rows(count)]


@pytest.mark.parametrize("size", [2, 3, 6, 7, 26, 64, "auto"])
def test_pairs_of_preferences(size):
    for make in OPTIMIZERS:
        model = Policy()
        step = assert_same_updates(model, [(x,) for x in rows(26)], dpo, make, micro_batch_size=size, groups=2)
        assert all(found % 2 == 0 for found in model.sizes)
        assert size == "auto" or max(model.sizes[1:]) <= max(size, 16) or size == 64
        assert step.micro_batch_size is not None


@pytest.mark.parametrize("size", [4, 5, 12, "auto"])
def test_a_query_with_its_hard_negatives(size):
    assert_same_updates(Policy(), [(x,) for x in rows(28)], negatives, micro_batch_size=size, groups=4)


@pytest.mark.parametrize("size", [4, 5, 9, "auto"])
@pytest.mark.parametrize("apart", [False, True])
def test_answers_that_are_normalised_within_their_prompt(size, apart):
    torch.manual_seed(5)
    order = torch.randperm(len(IDS)) if apart else torch.arange(len(IDS))
    for groups in (lambda x, reward, prompt: prompt, IDS[order]):
        assert_same_updates(Policy(), answers(order), grpo, compute_loss=grpo, micro_batch_size=size, groups=groups)


@pytest.mark.parametrize(
    ("loss", "batch", "message"),  # an odd number of rows is no pairs
    [(dpo, (rows(26)[0],), "raises on micro-batches"), (grpo, answers(torch.arange(len(IDS)))[0], "not additive")],
    ids=["dpo", "grpo"],
)
def test_without_groups_the_proof_refuses_what_a_split_would_change(loss, batch, message):
    with pytest.raises(NotEquivalentError, match=message):
        step_of(Policy(), compute_loss=loss, micro_batch_size=6, verify=True)(*batch)


def test_a_loss_that_looks_beyond_the_groups_is_refused():
    def beyond(model, x):
        return dpo(model, x) + model(x).var()

    batch, keywords = (rows(26)[0],), {"compute_loss": beyond, "groups": 2}
    with pytest.raises(NotEquivalentError, match="not additive over rows"):
        step_of(Policy(), micro_batch_size=6, verify=True, **keywords)(*batch)
    result = check_equivalence(Policy(), batch, **keywords)
    assert not result.ok
    assert result.causes[0].kind == "loss"


@pytest.mark.parametrize("size", [None, 4, pytest.param(9, marks=pytest.mark.slow)])
def test_check_equivalence_cuts_between_groups(size):
    batch = answers(torch.randperm(len(IDS), generator=torch.Generator().manual_seed(3)))[0]
    found = check_equivalence(
        Policy(), batch, compute_loss=grpo, groups=lambda x, r, prompt: prompt, micro_batch_size=size
    )
    assert found.raise_if_different().max_error <= FLOAT64
    assert check_equivalence(Policy(), (rows(26)[0],), compute_loss=dpo, groups=2, micro_batch_size=size).ok
    assert not check_equivalence(Policy(), batch, compute_loss=grpo, micro_batch_size=size).ok
    with pytest.raises(ValueError, match="at least 2 groups"):
        check_equivalence(Policy(), (rows(26)[0],), compute_loss=dpo, groups=26)


@pytest.mark.parametrize("limits", [(5, 99), (99, 5)])
@pytest.mark.parametrize("size", [20, "auto"])
def test_running_out_of_memory_splits_between_groups(limits, size):
    keywords = {"micro_batch_size": size, "groups": IDS, "verify": False}
    assert_same_updates(Policy(*limits), answers(torch.arange(len(IDS))), grpo, reference=Policy(), **keywords)


def test_a_group_that_does_not_fit_into_memory_is_named():
    model = Policy(3, 99)
    step = step_of(model, compute_loss=grpo, micro_batch_size=20, groups=IDS)
    with pytest.raises(torch.OutOfMemoryError, match=r"group (7|8) \(4 rows\), whose rows stay together"):
        step(*answers(torch.arange(len(IDS)))[0])


def test_groups_too_large_to_be_proven_together_are_said_to_be(caplog):
    model = Policy(9)
    step = step_of(model, verify=True, compute_loss=negatives, micro_batch_size=8, groups=4)
    step(rows(28)[0])
    assert step.updates == 1
    assert "could not be proven: 12 rows of this batch" in caplog.text


def test_a_size_below_the_largest_group_that_memory_has_taught_is_kept_in_a_resumed_run():
    first, second = (step_of(Policy(4, 99), compute_loss=grpo, micro_batch_size=5, groups=IDS) for _ in range(2))
    batch = answers(torch.arange(len(IDS)))[0]
    expected = first(*batch)
    assert first.micro_batch_size < 4
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(second(*batch), expected)


def text(model, batch):
    """Pairs of texts: the mean of their tokens' scores is compared."""
    scores = model(batch["input_ids"], batch["attention_mask"]).logsumexp(-1)
    score = (scores * batch["attention_mask"]).sum(1) / batch["attention_mask"].sum(1)
    return -F.logsigmoid(score[0::2] - score[1::2]).mean()


def texts(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([3, 12, 1, 7, 2, 2, 5, 9, 4, 1, 6, 3])
    mask = (torch.arange(12) < lengths[:, None]).long()
    return {"input_ids": torch.randint(1, 20, mask.shape, generator=generator) * mask, "attention_mask": mask}


@pytest.mark.parametrize("limit", [99, 4])
def test_packing_by_tokens_keeps_groups_together(limit):
    class Limited(Attention):
        limit = 99

        def forward(self, input_ids, attention_mask):
            if len(input_ids) > self.limit:
                raise torch.OutOfMemoryError(OUT)
            return super().forward(input_ids, attention_mask)

    model = Limited()
    model.limit = limit
    keywords = {"groups": 2, "verify": limit == 99, "max_tokens": 40}
    assert_same_updates(model, [(texts(seed),) for seed in range(3)], text, reference=Limited(), **keywords)
    assert max(model.tokens[-6:]) <= 40
    step = step_of(Limited(), compute_loss=text, max_tokens=20, groups=2)
    with pytest.raises(ValueError, match=r"group 0 \(2 rows\) of up to 12 columns, 24 padded tokens, in max_tokens=20"):
        step(texts(0))


def test_terms_and_groups_go_together():
    def terms(model, x):
        return {"dpo": (dpo(model, x), len(x) // 2), "z": (model(x).square().mean(), len(x))}

    keywords = {"compute_loss": terms, "micro_batch_size": 6, "groups": 2}
    assert_same_updates(Policy(), [(x,) for x in rows(26)], total(terms), **keywords)


# What is refused.

WRONG = {
    "too many rows": (8, 4, r"group 0 \(8 rows\) in micro_batch_size=4. Its rows stay together"),
    "no multiple": (5, "auto", "groups=5 keeps 5 rows together, but the batch has 24"),
    "too few ids": (torch.arange(23), 4, "one whole number for each of the batch's 24 rows. Received: shape .23,."),
    "no whole numbers": (torch.rand(24), 4, "one whole number for each"),
    "names": (
        lambda x: ["a"] * 24,
        4,
        "one whole number for each of the batch's 24 rows. Received: .'a'.* Number them",
    ),
    "nothing": (lambda x: None, 4, "one whole number for each of the batch's 24 rows. Received: None of type NoneType"),
    "nothing of a row": (lambda x: x, 4, "one whole number for each of the batch's 24 rows. Received: shape .24, 5."),
}


@pytest.mark.parametrize("case", WRONG)
def test_groups_that_do_not_match_the_rows_are_an_error(case):
    groups, size, message = WRONG[case]
    model = Policy()
    step = step_of(model, compute_loss=dpo, micro_batch_size=size, groups=groups, verify=True)
    with pytest.raises((TypeError, ValueError), match=message):
        step(rows(24)[0])


@pytest.mark.parametrize("groups", [0, -2, True, 2.5, "ids"])
def test_what_is_no_groups_is_an_error(groups):
    model = Policy()
    with pytest.raises((TypeError, ValueError), match="groups"):
        step_of(model, verify=True, compute_loss=dpo, groups=groups)
    with pytest.raises((TypeError, ValueError), match="groups"):
        check_equivalence(model, (rows(24)[0],), compute_loss=dpo, groups=groups)


def test_exact_batch_norm_has_all_rows_at_once_in_any_case():
    with pytest.raises(ValueError, match="Leave out `groups`"):
        TrainStep(Policy(), torch.optim.SGD(Policy().parameters()), compute_loss=dpo, groups=2, batch_norm="exact")
