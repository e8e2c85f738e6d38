"""TrainStep(reproducible=True) on several ranks: the bits of one process."""

import random

import pytest
import torch

from tests.torch.reproducible.problems import KINDS, OPTIMIZERS, Training, bits_of


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_ranks_brings_the_bits_of_one(four_ranks, kind):
    optimizer = "AdamW" if len(kind) % 2 else "SGD"
    (alone,) = {Training(kind, optimizer).run(2).bits()}
    for ranks in (2, 3, 4):
        found = four_ranks.run(bits_of, kind, optimizer, ranks)
        assert found[:ranks] == [alone] * ranks, ranks


@pytest.mark.parametrize("kind", ["dropout", "several", "batch norm"])
def test_backward_and_a_rank_without_rows_bring_the_same_bits(four_ranks, kind):
    options = {"size": 7, "backward": True, "epochs": 1}  # of 22 rows in the last batch, four ranks get 7, 7, 7 and 1
    alone = Training(kind, size=7).run(1, backward=True).bits() if kind != "batch norm" else None
    if alone is not None:
        assert four_ranks.run(bits_of, kind, "SGD", 4, **options) == [alone] * 4
    alone = Training(kind, batch=12, size=6).run(1).bits()  # 10 rows in the last: two ranks get none
    assert four_ranks.run(bits_of, kind, "SGD", 4, batch=12, size=6, epochs=1) == [alone] * 4


def refused(rank, what):
    """The error on this rank, and whether anything moved."""
    training = Training(
        "plain", rank=rank, ranks=2, seed=rank if what == "seeds" else 0,
        **({"clip_grad_norm": 1.0 + rank} if what == "options" else {}),
    )  # fmt: skip
    before = [p.detach().clone() for p in training.model.parameters()]
    x, y = next(iter(training.loader()))
    if what == "rows":
        x, y = x[: 5 + rank], y[: 5 + rank]
    elif what == "no rows":
        x, y = x[:0], y[:0]
    elif what == "updates":
        training.step.load_state_dict({
            "updates": 0, "sizes": training.step.state_dict()["sizes"],
            "reproducible": {"seed": 0, "windows": rank, "gradients": {}, "told": False},
        })  # fmt: skip
    try:
        training.step(x, y)
        return None
    except ValueError as error:
        assert all(torch.equal(p, b) for p, b in zip(training.model.parameters(), before, strict=True))
        return str(error)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("seeds", "the seed, torch.initial_seed() must be the same on every rank. Received: 0 on rank 0, 1 on rank 1"),
        ("rows", "micro_batch_size=4 rows; only the last rank with rows may end in a shorter one. Received: 5 rows on"),
        ("no rows", "Received: 0 rows on all ranks"),
        ("updates", "the number of windows before must be the same on every rank. Received: 0 on rank 0, 1 on rank 1"),
    ],
)
def test_ranks_that_do_not_fit_together_are_told_so_before_anything_moves(ranks, what, message):
    for found in ranks.run(refused, what):
        assert message in found


def test_ranks_with_other_options_are_told_so(ranks):
    found = ranks.try_run(refused, "options")
    assert all("`clip_grad_norm` must be the same on every rank" in result.message for result in found)


def other_sampler(rank):
    training = Training("plain", rank=rank, ranks=2)
    training.sampler.micro_batch_size = 2
    with pytest.raises(ValueError, match="must have the same `micro_batch_size`"):
        training.step(*next(iter(training.loader())))
    training.sampler.micro_batch_size = 4
    training.sampler = None
    return True


def test_a_sampler_of_another_micro_batch_size_is_refused_on_all_ranks(new_ranks):
    assert new_ranks.run(other_sampler) == [True, True]


def program(number):
    """A random training, and whether it calls `step.backward`."""
    choice = random.Random(number)
    kind, optimizer, size = choice.choice([*KINDS]), choice.choice([*OPTIMIZERS]), choice.randint(2, 9)
    options = {"size": size, "batch": choice.randint(size, 40), "seed": choice.randint(0, 99)}
    if kind not in ("clip", "scaler") and choice.random() < 0.4:
        options["clip_grad_norm"] = choice.choice([0.01, 0.5, 10.0])
    if kind != "clip value" and choice.random() < 0.2:
        options["clip_grad_value"] = 0.02
    if kind not in ("bfloat16", "wide sums", "float64") and choice.random() < 0.2:
        options["autocast"] = torch.bfloat16
    return kind, optimizer, options, choice.random() < 0.2


def outcomes(rank, numbers, ranks):
    """The bits that these programs end with; of those that are refused, as BatchNorm's single rows are, the error."""
    found = []
    for number in numbers:
        kind, optimizer, options, backward = program(number)
        try:
            training = Training(kind, optimizer, rank, ranks, **options).run(1, backward)
            found.append(training.bits())
            training.step = None
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 300, 20))
def test_random_programs_end_with_the_same_bits_on_two_ranks(ranks, first):
    numbers = range(first, first + 20)
    alone = outcomes(0, numbers, 1)
    assert ranks.run(outcomes, numbers, 2) == [alone, alone]
    assert sum(len(bits) == 64 for bits in alone) > 10
