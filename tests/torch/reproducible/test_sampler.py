"""GlobalBatchSampler: the same micro-batches on any number of ranks, and epochs that go on on another number."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from gradaccum.torch import GlobalBatchSampler
from gradaccum.torch.reproducible.sampler import check_micro_batch_size


def samplers(ranks, rows=100, **options):
    options = {"batch_size": 24, "micro_batch_size": 4, **options}
    return [GlobalBatchSampler(rows, rank=rank, ranks=ranks, **options) for rank in range(ranks)]


def epoch(each):
    """The rows of each global batch of one epoch, in the ranks' order."""
    return [list(itertools.chain(*parts)) for parts in zip(*each, strict=True)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_any_number_of_ranks_shares_out_the_same_batches(ranks, drop_last):
    each, (alone,) = samplers(ranks, drop_last=drop_last), samplers(1, drop_last=drop_last)
    for _ in range(3):
        assert epoch(each) == list(alone)
    assert len(alone) == (4 if drop_last else 5)


def test_ranks_have_whole_micro_batches_as_evenly_as_can_be():
    sizes = [list(map(len, each)) for each in samplers(3, rows=30, batch_size=8, micro_batch_size=1, shuffle=False)]
    assert sizes == [[3, 3, 3, 2], [3, 3, 3, 2], [2, 2, 2, 2]]
    *whole, last = samplers(3, rows=22, batch_size=22, shuffle=False)
    assert list(map(len, itertools.chain(*whole))) == [8, 8]
    assert list(last) == [[16, 17, 18, 19, 20, 21]]  # a ragged micro-batch is the last rank's


def test_the_order_follows_from_seed_and_epoch_alone():
    (first,), (again,), (other,) = samplers(1), samplers(1), samplers(1, seed=1)
    one, two = list(first), list(first)
    torch.manual_seed(5)
    assert [list(again), list(again)] == [one, two]
    assert sorted(itertools.chain(*one)) == sorted(itertools.chain(*two)) == list(range(100))
    assert one != two
    assert list(other) not in (one, two)
    again.set_epoch(1)
    assert list(again) == two
    assert next(iter(samplers(1, shuffle=False)[0])) == list(range(24))


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (4, 1)])
@pytest.mark.parametrize("taken", [0, 2, 5])
def test_an_epoch_goes_on_on_another_number_of_ranks(before, after, taken):
    (alone,), each = samplers(1), samplers(before)
    everything = [*alone, *alone, *alone]
    assert epoch(each) == everything[:5]
    loops = [iter(sampler) for sampler in each]
    assert [list(itertools.chain(*map(next, loops))) for _ in range(taken)] == everything[5 : 5 + taken]
    states = [sampler.state_dict() for sampler in each]
    assert states == states[:1] * before
    resumed = samplers(after)
    for sampler in resumed:
        sampler.load_state_dict(states[0])
    rest = epoch(resumed) if taken < 5 else []
    assert rest + epoch(resumed) == everything[5 + taken :]


def test_without_batches_a_state_counts_what_workers_have_fetched_ahead_and_with_them_what_was_used():
    (sampler,) = samplers(1)
    loader = DataLoader(TensorDataset(torch.arange(100)), batch_sampler=sampler, num_workers=1, prefetch_factor=2)
    batches = iter(loader)
    used = [next(batches)[0].tolist()]
    ahead, counted = sampler.state_dict(), sampler.state_dict(batches=1)
    assert ahead["batches"] > 1
    (resumed,) = samplers(1)
    resumed.load_state_dict(counted)
    assert used + list(resumed) == list(samplers(1)[0])
    del batches


def test_without_workers_what_is_handed_out_is_what_was_used():
    (sampler,), (resumed,) = samplers(1), samplers(1)
    for _ in zip(range(2), loader := DataLoader(TensorDataset(torch.arange(100)), batch_sampler=sampler), strict=False):
        pass
    assert len(loader) == 5
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == list(samplers(1)[0])[sampler.state_dict()["batches"] :]


def test_a_rank_without_rows_collates_a_batch_of_none():
    data = TensorDataset(torch.arange(10.0), torch.arange(20).view(10, 2))
    sampler = GlobalBatchSampler(data, batch_size=8, micro_batch_size=2, rank=2, ranks=3)
    sizes = [
        (x.shape, y.shape, y.dtype) for x, y in DataLoader(data, batch_sampler=sampler, collate_fn=sampler.collate)
    ]
    assert sizes == [((2,), (2, 2), torch.int64), ((0,), (0, 2), torch.int64)]


def test_a_loop_that_is_left_is_followed_by_the_next_epoch():
    (sampler,), (whole,) = samplers(1), samplers(1)
    next(iter(sampler))
    epochs = [list(whole), list(whole)]
    assert list(sampler) == epochs[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "`batch_size` must be an int >= 1"),
        ({"micro_batch_size": "auto"}, "`micro_batch_size` must be an int >= 1"),
        ({"seed": 1.5}, "`seed` must be an int"),
        ({"rank": 1}, "both `rank` and `ranks`"),
        ({"rank": 2, "ranks": 2}, "less than `ranks`"),
        ({"data_source": iter([])}, "must have a length"),
        ({"data_source": -1}, "at least 0 rows"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        GlobalBatchSampler(**{"data_source": 10, "batch_size": 4, "micro_batch_size": 2, **options})


def test_a_state_of_other_rows_is_refused():
    (sampler,) = samplers(1)
    for other in (samplers(1, rows=99), samplers(1, seed=3), samplers(1, batch_size=20)):
        with pytest.raises(ValueError, match="would hand out other rows"):
            other[0].load_state_dict(sampler.state_dict())
    with pytest.raises(ValueError, match="no state of a GlobalBatchSampler"):
        sampler.load_state_dict({"epoch": 1})
    with pytest.raises(ValueError, match="at most the 5 batches"):
        sampler.state_dict(batches=6)
    with pytest.raises(ValueError, match="`epoch` must be"):
        sampler.set_epoch(-1)


def test_a_step_of_another_micro_batch_size_is_told_so():
    (sampler,) = samplers(1, micro_batch_size=3)
    next(iter(sampler))
    check_micro_batch_size(3)
    with pytest.raises(ValueError, match="must have the same `micro_batch_size`"):
        check_micro_batch_size(1000)
