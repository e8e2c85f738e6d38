"""TrainStep over several ranks: each brings its own large batch; the update and the loss are those of all rows.

Sharded models may not fit, and all ranks run their passes together, whatever happens on one.
"""

import contextlib
import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gradaccum.torch.measure.fake_memory import LiveBytes
from tests.reference import FLOAT64, relative_error
from tests.torch.distributed.problems import (
    LENGTHS,
    SIX,
    SYNCS,
    TAGGED,
    Fragile,
    Heads,
    Oracle,
    Tagger,
    check_steps,
    concatenated,
    data,
    error_of,
    lines_of,
    network,
    shard,
    slowly,
    spread,
    step_of,
    tagged,
    text,
    whole,
)
from tests.torch.distributed.processes import on_ranks

CLASSES = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.2], dtype=torch.float64), ignore_index=1)


def half(m, x, y):
    """A mean over the rows that are not of the first class, and what it is over."""
    weights = (y > 0).double()
    return (cross_entropy(m(x), y, reduction="none") * weights).sum() / weights.sum(), weights.sum()


def terms(m, x, y):
    """Several losses, with a denominator each; of the third, ranks and micro-batches have nothing now and then."""
    outputs = m(x)
    found = {
        "ce": (cross_entropy(outputs, y, ignore_index=1), (y != 1).sum()),
        "rows": (outputs.square().mean(), len(x)),
        "rare": (outputs[y == 2].sum() / (y == 2).sum(), (y == 2).sum()),
    }
    return {name: term for name, term in found.items() if term[1] > 0}


def each_term(m, x, y):
    return {name: loss for name, (loss, _) in terms(m, x, y).items()}


def counts(x, y):
    return {"ce": (y != 1).sum(), "rows": len(x), "rare": (y == 2).sum()}


def of_half(m, x, y):
    return half(m, x, y)[0]


def summed(m, x, y):
    return cross_entropy(m(x), y, reduction="sum") / 10


def all_terms(m, x, y):
    return sum(each_term(m, x, y).values())


KINDS = {
    # TrainStep's arguments, and the loss of the large batch.
    "rows": ({}, lambda m, x, y: cross_entropy(m(x), y)),
    "classes": ({"loss_fn": CLASSES}, lambda m, x, y: CLASSES(m(x), y)),
    "told": ({"compute_loss": half}, of_half),
    "weight": ({"compute_loss": of_half, "weight": lambda x, y: (y > 0).sum()}, of_half),
    "sum": ({"compute_loss": summed, "reduction": "sum"}, summed),
    "scaler": ({}, lambda m, x, y: cross_entropy(m(x), y)),
    "terms": ({"compute_loss": terms}, all_terms),
    "terms, counted": ({"compute_loss": each_term, "weight": counts}, all_terms),
}
SIZES, FEWER, FIRST = [[9, 8, 4], [3, 7, 12]], [[9, 8, 0], [3, 7, 5]], [[0, 4], [3, 12]]
SHARDED, NOTHING = [[8, 3, 8], [6, 9, 0]], [[4, 5, 3], [3, 6, 4]]
UPDATES = [
    *(("ddp", SIZES, kind, "sgd", "window") for kind in ("rows", "told", "sum")),
    ("ddp", SIZES, "classes", "adam", "window"),
    ("ddp", [[4, 0, 3], [5, 6, 0]], "rows", "sgd", "window"),  # a rank without rows
    ("ddp", [[0, 4, 3], [5, 6, 0]], "scaler", "sgd", "window"),  # which is its first update
    *(("ddp", sizes, kind, "adam", "window") for sizes in (FEWER, FIRST) for kind in ("terms", "terms, counted")),
    ("fsdp2", SHARDED, "weight", "sgd", "window"),
    ("fsdp2", SHARDED, "told", "sgd", "micro_batch"),
    # No rank's rows weigh anything, but for those of the second batch.
    *((engine, NOTHING, k, "sgd", "window") for engine in ("ddp", "fsdp2") for k in ("classes", "told", "weight")),
]


@pytest.mark.parametrize(("engine", "sizes", "kind", "optimizer", "sync"), UPDATES)
@on_ranks()
def test_the_update_and_the_loss_are_those_of_all_ranks_rows(rank, engine, sizes, kind, optimizer, sync):
    """Each of several losses is divided by its weight on all ranks."""
    oracle, used = Oracle(network(), optimizer), spread(engine, network())
    keywords, plain = KINDS["rows" if kind == "scaler" else kind]
    if kind == "scaler":
        keywords = {"scaler": torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)}
    micro = 3 if engine == "fsdp2" else 4 - rank if sizes in (SIZES, FEWER, FIRST) else 2
    step = step_of(used, optimizer, micro_batch_size=micro, sync=sync, verify=True, **keywords)
    for own in zip(*data(sizes), strict=True):
        if "terms" in kind:  # rank 1 never has the rare one
            own = own[0], (own[1][0], torch.where(own[1][1] == 2, 0, own[1][1]))
        if sizes == NOTHING and len(own[0][0]) != 5:
            own = [(x, torch.full_like(y, 1 if kind == "classes" else 0)) for x, y in own]
            assert step(*own[rank]).isnan()
            continue
        x, y = concatenated(own)
        named = each_term(oracle.model, x, y) if "terms" in kind else {}
        expected = {name: value.item() for name, value in named.items()}
        expected[""] = oracle.update((x, y), lambda m, rows: plain(m, *rows))
        loss = step(*own[rank])
        found = {"": loss.item(), **{name: loss.item() for name, loss in step.losses.items() if not loss.isnan()}}
        assert found == pytest.approx(expected, rel=FLOAT64, abs=0)
    oracle.check(used)
    assert step.updates == oracle.updates


@pytest.mark.parametrize("engine", ["ddp", "fsdp2 at once"])
@on_ranks()
def test_parameters_that_no_rank_uses_are_left_alone(rank, engine):
    """A head without a turn, and one that rank 1 alone uses: none of DDP's flags says so."""
    oracle, used, ranks = Oracle(Heads(), "adamw"), spread(engine, Heads()), data([[4, 6, 5], [3, 5, 2]])

    def loss(m, x, y, head=rank):
        return cross_entropy(m(x, head), y)

    step = step_of(used, "adamw", compute_loss=loss, micro_batch_size=2)

    def loss_of_ranks(m, own):
        return sum(loss(m, *rows, r) * len(rows[0]) for r, rows in enumerate(own)) / sum(len(x) for x, _ in own)

    for own in zip(*ranks):
        oracle.update(own, loss_of_ranks)
        step(*own[rank])
    oracle.check(used)


@pytest.mark.parametrize(
    ("engine", "weight", "adds"),
    [("ddp", 131072.0, "mean"), ("ddp", 131072.0, "sum"), ("fsdp2", 1e-6, "mean"), ("fsdp2", 131072.0, "sum")],
)
@on_ranks()
def test_what_is_reduced_in_float16_is_of_the_gradients_size_whatever_the_weights_are(rank, engine, weight, adds):
    """As many tokens as large batches have, or next to none."""
    oracle, model, factor = Oracle(network(torch.float32)), network(torch.float32), weight if adds == "sum" else 1.0
    if engine == "ddp":
        used = spread(engine, model)
        used.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        used = spread(engine, model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))

    def loss(m, x, y):
        return cross_entropy(m(x), y, reduction=adds) * factor, weight * len(x)

    step = step_of(used, compute_loss=loss, micro_batch_size=2, reduction=adds, verify=True)
    check_steps(rank, step, oracle, data(SIX, dtype=torch.float32), bound=2**-9)


# Where micro-batches may not fit.


def shard_layers(model):
    return shard(model, *model.layers)


@on_ranks()
def test_after_a_restart_random_numbers_and_buffers_are_as_if_the_larger_size_had_never_been_tried(rank):
    found = []
    for fails in (True, False):
        model = shard_layers(Fragile(dropout=0.5))
        if fails and rank == 1:
            model.places[3].rows, model.places[3].backward = 2, True
        step = step_of(model, micro_batch_size=4 if fails else 2)
        torch.manual_seed(rank)
        for rows in data([[4, 3], [4, 4]])[rank]:
            step(*rows)
        found.append((whole(model), torch.get_rng_state(), model.calls.item()))
    (one, numbers, calls), (other, expected, _) = found
    assert relative_error(one, other) == 0.0
    assert torch.equal(numbers, expected)
    assert calls == 2


@on_ranks()
def test_code_that_goes_on_after_any_error_keeps_no_rank_waiting(rank):
    """And ends its pass by another one."""
    oracle, model = Oracle(Fragile()), shard_layers(Fragile())
    model.places[1].rows = 2 if rank == 1 else 999

    def stubborn(m, x, y):
        with contextlib.suppress(Exception) if rank == 0 else contextlib.nullcontext():
            return cross_entropy(m(x), y)
        return cross_entropy(m(x), y)

    check_steps(rank, step_of(model, compute_loss=stubborn), oracle, data([[6, 3], [5, 4]]))


def at_random(rank, seed):
    draw, count = random.Random(seed), dist.get_world_size()
    sync, clip = draw.choice(SYNCS), draw.choice([None, 0.05])
    oracle, model = Oracle(Fragile(), "adam", clip), shard_layers(Fragile())
    step = step_of(model, "adam", sync=sync, micro_batch_size=draw.randint(2, 9), clip_grad_norm=clip)
    sizes = [[draw.choice([0, 1, 2, 5, 9, 13]) for _ in range(4)] for _ in range(count)]
    sizes[0] = [max(size, 1) for size in sizes[0]]
    ranks = data(sizes, epoch=seed)
    oracle.see(ranks, 1)
    for rows in ranks[rank]:
        for r in range(count):
            place, fit, backward = draw.randrange(4), draw.randint(1, 12), draw.random() < 0.5
            if r == rank:
                for p in model.places:
                    p.rows = 999
                model.places[place].rows, model.places[place].backward = fit, backward
        step(*rows)
    oracle.check(model)


@pytest.mark.parametrize("seed", slowly([39], range(39)))
@on_ranks()
def test_memory_that_runs_out_anywhere_keeps_the_update_exact(rank, seed):
    at_random(rank, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@on_ranks("four_ranks")
def test_memory_that_runs_out_anywhere_keeps_hybrid_sharding_exact(rank, seed):
    at_random(rank, seed)


@pytest.mark.parametrize("sync", slowly(["micro_batch"], ["window"]))
@on_ranks()
def test_auto_is_predicted_by_each_rank_and_all_run_as_many_passes(rank, sync):
    """Ranks have different memory, and draw no random numbers for it."""
    torch.manual_seed(0)
    model, limit = nn.Sequential(nn.Linear(5, 4000), nn.Tanh(), nn.Linear(4000, 3)).double(), 3 * 2**20
    oracle, used, seen = Oracle(model), shard(model), []
    step = step_of(used, micro_batch_size="auto", memory_limit=limit if rank == 1 else 2**30, sync=sync)
    step.update._meter.live = lambda: 0  # the tests' own process does not count
    used.register_forward_pre_hook(lambda m, inputs: seen.append(len(inputs[0]) * (type(inputs[0]) is Tensor)))
    ranks, numbers = data([[64, 64], [64, 20]]), torch.get_rng_state()
    oracle.see(ranks, 1)
    seen.clear()
    step(*ranks[rank][0])
    assert torch.equal(numbers, torch.get_rng_state())
    with LiveBytes() as live:
        step(*ranks[rank][1])
    oracle.check(used)
    passes, size = [rows for rows in seen if rows], step.micro_batch_size or 0
    assert set(gathered(len(passes))) == {len(passes)}  # in both updates
    if rank == 0:
        assert size == 64  # where nothing is short
    else:
        assert 4 < size < 40
        assert max(passes) <= size
        assert 0.3 * limit < live.peak <= limit


def gathered(mine):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


@on_ranks()
def test_several_losses_of_shards_that_only_a_pass_shows_are_refused_without_a_word_about_memory(rank):
    step = step_of(shard(network()), compute_loss=lambda m, x, y: {"rows": (cross_entropy(m(x), y), len(x))})
    said = []
    lines = lines_of(lambda: said.append(error_of(lambda: step(*data([[8]] * 2)[rank][0]))))
    assert said[0].startswith("ValueError: The denominators of several losses must be known")
    assert not any("memory" in line for line in lines)


# Ragged rows of tokens, and `pack`.


def spread_tagger(model, engine):
    if engine == "DDP":
        return DistributedDataParallel(model)
    parts = {
        "at once": [],
        "the head with the rest": [model.embedding, model.middle],
        "the head by itself": [model.embedding, model.middle, model.head],
        "outputs cast": [model.head],
    }
    policy = MixedPrecisionPolicy(output_dtype=torch.float64 if engine == "outputs cast" else None)
    for part in parts[engine]:
        fully_shard(part, mp_policy=policy)
    return fully_shard(model, reshard_after_forward=True, mp_policy=policy)


def laid(batch, rows):
    """Rows one behind the other."""
    found = {}
    for name, filler in (("input_ids", 0), ("labels", -100)):
        lines = [torch.cat([batch[name][row][batch["attention_mask"][row] != 0] for row in pack]) for pack in rows]
        found[name] = nn.utils.rnn.pad_sequence(lines, batch_first=True, padding_value=filler)
    return found


def train_tagger(rank, engine, updates, own_loss=True, clip=None, **keywords):
    """Updates of a language model on rows of these lengths. Returns the tokens of the last one's passes."""
    model, seen = Tagger(own_loss), []
    oracle = Oracle(model, "adam", clip)
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]["input_ids"].numel()))
    if (fits := keywords.pop("fits", None)) is not None and rank == fits[0]:
        model.place.rows = fits[1]
    used = spread_tagger(model, engine)
    step = step_of(used, "adam", **TAGGED, clip_grad_norm=clip, **keywords)
    for update, lengths in enumerate(updates):
        seen.clear()
        check_steps(rank, step, oracle, [[text(own, 10 * update + r)] for r, own in enumerate(lengths)], tagged)
    if fits is not None and engine == "DDP":
        assert fits[1] > 20 or (model.place.failures > 0) == (
            rank == fits[0]
        )  # how far "auto" climbs depends on the clock
    return seen


APART, LONG_AND_SHORT = "the head by itself", [LENGTHS, LENGTHS[::-1]]
CLIPPED, PACKED = {"max_tokens": 24, "clip": 0.05}, {"pack": laid, "max_tokens": 24, "clip": 0.05}
BY_TOKENS, FEW = {"max_tokens": 48, "verify": True}, {"micro_batch_size": 2}
EACH = [LENGTHS] * 3
TEXTS = {
    # The engine, the lengths of each update's rows, options. Of long rows on one rank and short ones on the other, in
    # turns, each rank has passes of about the same cost, and as many.
    "passes of the same cost": (APART, LONG_AND_SHORT, BY_TOKENS),
    # Each rank of a replicated model searches, packs and runs out of memory for itself.
    "auto on replicas": ("DDP", LONG_AND_SHORT, {"fits": (1, 60), "micro_batch_size": "auto"}),
    "max_tokens on replicas": ("DDP", LONG_AND_SHORT, {"fits": (0, 20), "max_tokens": 48}),
    "a loss outside of the model": ("at once", EACH, {**CLIPPED, "own_loss": False}),
    "its own loss": (APART, EACH, CLIPPED),
    "passes for the other rank's sake": (APART, [[LENGTHS[0], [9]]] * 3, FEW),
    "outputs that sharded modules cast": ("outputs cast", EACH, {"micro_batch_size": 3}),
    "packed, DDP": ("DDP", EACH, PACKED),
    "packed, at once": ("at once", EACH, PACKED),
}
TEXTS_SLOWLY = {
    "passes of the same cost, of 20 tokens": (APART, LONG_AND_SHORT, {**BY_TOKENS, "fits": (1, 20)}),
    "passes of the same cost, in groups": (APART, LONG_AND_SHORT, {**BY_TOKENS, "groups": 2}),
    **{
        f"clipped, {engine}, {own_loss=}": (engine, EACH, {**CLIPPED, "own_loss": own_loss})
        for engine in ("DDP", "at once", "the head with the rest", APART) for own_loss in (True, False)
    },
    **{f"packed, {engine}": (engine, EACH, PACKED) for engine in ("DDP", "at once", APART)},
}  # fmt: skip


@pytest.mark.parametrize("what", slowly(TEXTS, TEXTS_SLOWLY))
@on_ranks()
def test_ragged_rows_of_tokens_in_passes_of_few_make_the_update_of_all_ranks_rows(rank, what):
    engine, updates, options = {**TEXTS, **TEXTS_SLOWLY}[what]
    seen = train_tagger(rank, engine, updates, **options)
    if engine != "DDP" and "fits" not in options:
        assert set(gathered(len(seen))) == {len(seen)}
    if engine != "DDP" and updates is LONG_AND_SHORT:
        assert max(seen) <= 48
        assert rank == 1 or max(seen) <= 12 or "fits" in options  # 17 tokens in as many passes as 96 elsewhere
    if "pack" in options and rank == 0:
        assert sum(seen) <= 1.1 * sum(LENGTHS[0])
    if "sake" in what:
        assert len(seen) == 4
