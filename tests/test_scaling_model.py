"""Times of updates on several ranks: the model against its simulation, and what it says at its ends."""

import math

import pytest

from benchmarks import scaling_model
from benchmarks.scaling_model import Link, Scaling, WindowMessage

LINK = Link(1e9, 1e-5)


@pytest.mark.parametrize("every_micro_batch", [False, True])
@pytest.mark.parametrize(("ranks", "steps", "updates"), [(2, 1, 4000), (7, 5, 400), (300, 4, 20)])
def test_the_formula_is_the_simulations_mean(ranks, steps, updates, every_micro_batch):
    job, how = Scaling(0.1, 2e7, LINK, update_seconds=0.02, spread=0.2), {"every_micro_batch": every_micro_batch}
    drawn = job.simulated_seconds(ranks, steps, updates=updates, **how)
    assert job.update_time(ranks, steps, **how) == pytest.approx(drawn, rel=0.01)


def test_without_spread_the_simulation_is_the_formula_and_one_rank_waits_for_nobody():
    job = Scaling(0.1, 1e8, LINK, update_seconds=0.02, overlap=0.0)
    assert job.simulated_seconds(4, 3, updates=2) == pytest.approx(job.update_time(4, 3), rel=1e-12)
    assert job.update_time(4, 3) == pytest.approx(0.3 + 2 * 3 * (1e-5 + 1e8 / 4 / 1e9) + 0.02, rel=1e-12)
    job = Scaling(0.1, 1e9, LINK, spread=0.5)
    assert (job.update_time(1, 4), job.efficiency(1, 4), job.sent_bytes(1, 4)) == (pytest.approx(0.4), 1.0, 0)


def test_a_reduction_is_the_faster_of_ring_and_tree():
    assert LINK.reduction_seconds(2, 1e9) == pytest.approx(1.0, rel=1e-4)
    large, small = LINK.reduction_seconds(4096, 1e9), LINK.reduction_seconds(4096, 8)
    assert large == pytest.approx(2 + 24e-5, rel=1e-3), "a tree: the ring's 8190 messages take longer"
    assert small == pytest.approx(24e-5, rel=1e-3)
    assert LINK.reduction_seconds(64, 1e9) < 2, "a ring"


def test_a_window_divides_messages_and_waits_by_its_length():
    """Against a reduction after each micro-batch: K times the bytes, and the rank that is slow at the moment."""
    job = Scaling(0.1, 1e8, LINK, overlap=0.0, spread=0.1)
    assert job.sent_bytes(8, 16, every_micro_batch=True) == 16 * job.sent_bytes(8, 16) == 16 * 1.75e8
    waits = [
        job.update_time(8, 16, every_micro_batch=each) - 1.6 - (16 if each else 1) * job.exposed_seconds(8)
        for each in (True, False)
    ]
    assert waits[0] / waits[1] == pytest.approx(math.sqrt(16), rel=1e-9)


@pytest.mark.parametrize("spread", [0.0, 0.1])
@pytest.mark.parametrize("goal", [0.3, 0.9, 0.99])
def test_the_shortest_window_for_an_efficiency_is_that(goal, spread):
    for ranks in (2, 64, 4096):
        job = Scaling(0.5, 2e9, Link.parse("25Gbit/s"), update_seconds=0.05, spread=spread)
        steps = job.steps_for(ranks, goal)
        assert job.efficiency(ranks, steps) >= goal - 1e-12
        assert steps == 1 or job.efficiency(ranks, steps - 1) < goal


@pytest.mark.parametrize(("size", "overlap", "hidden"), [(100, 1.0, 4), (100, 0.0, 1), (1, 1.0, 1)])
def test_messages_hide_behind_the_backward_pass_but_for_the_last_bucket(size, overlap, hidden):
    """Of 25 MiB."""
    job = Scaling(1.0, size * 2**20, LINK, overlap=overlap)
    assert job.exposed_seconds(2) == pytest.approx(LINK.reduction_seconds(2, size * 2**20) / hidden)


LINKS = {"25Gbit/s": (3.125e9, 2e-5), "300GB/s": (3e11, 2e-5), "10 Gbps, 5us": (1.25e9, 5e-6)}
LINKS["2 GiB/s,1 ms"] = (2**31, 1e-3)


def test_links_are_read_and_what_is_none_is_refused():
    for text, (bandwidth, latency) in LINKS.items():
        assert Link.parse(text) == Link(bandwidth, pytest.approx(latency))
    for text in ["", "fast", "25G", "-1Gbit/s", "0Gbit/s", "25Gbit/s, 5", "25Gbit"]:
        with pytest.raises(ValueError, match="A link is a bandwidth such as '25Gbit/s' or '300GB/s'") as error:
            Link.parse(text)
        assert repr(text) in str(error.value)


def test_a_window_s_message_is_hidden_by_half_a_second_s_backward_pass_on_a_thousand_ranks():
    from gradaccum.torch.distributed.channel import LENGTH

    message, job = WindowMessage(1024), Scaling(0.5, 2e9, Link.parse("25Gbit/s"))
    assert scaling_model.LENGTH == LENGTH
    assert message.seconds(job.link) < 0.1 * scaling_model.BACKWARD * job.seconds
    assert message.sent_bytes < 1e-4 * job.sent_bytes(1024, 1)
