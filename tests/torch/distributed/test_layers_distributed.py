"""Layer by layer on several ranks."""

import functools
import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gradaccum.core.sizes import FixedSize, Rows
from gradaccum.torch import Blocks
from gradaccum.torch.layers.blocks import find_blocks
from tests.reference import FLOAT32, FLOAT64, relative_error
from tests.torch.distributed import problems
from tests.torch.distributed.problems import (
    SYNCS,
    Fragile,
    NoMemory,
    Oracle,
    collectives,
    concatenated,
    data,
    error_of,
    loss_of,
    slowly,
    whole,
)
from tests.torch.distributed.processes import on_ranks
from tests.torch.layers.problems import in_blocks


class Block(nn.Module):
    """What all blocks are given besides: a scale that is learned, outside of them."""

    def __init__(self, inner=8, dropout=0.0):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(6, inner), nn.Linear(inner, 6), nn.Dropout(dropout)
        self.place = NoMemory()

    def forward(self, x, scale):
        return x + scale * self.dropout(self.down(torch.tanh(self.up(self.place(x)))))


def between_blocks(model, x):
    return model.norm(x)


class Network(nn.Module):
    """A stem, blocks with something in between, and a head."""

    def __init__(self, dropout=0.0, blocks=3, between=between_blocks):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm, self.between = nn.Linear(5, 6), nn.LayerNorm(6), between
        self.layers = nn.ModuleList(Block(dropout=dropout) for _ in range(blocks))
        self.scale, self.head = nn.Linear(5, 1), nn.Linear(6, 3)
        self.double()

    @property
    def places(self):
        return [layer.place for layer in self.layers]

    def forward(self, x):
        scale = self.scale(x)
        x = self.stem(x)
        for layer in self.layers:
            x = self.between(self, layer(x, scale))
        return self.head(x)


class Chain(Network):
    """Each parameter is used once, so that gradients in bfloat16 are added up between micro-batches only."""

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, x.new_ones(()))
        return self.head(self.norm(x)) + self.scale(x.detach()[:, :5])


class SpareBlock(Block):
    """Has a parameter that no row uses, and one that only some do."""

    def __init__(self):
        super().__init__()
        self.some, self.nobody = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))

    def forward(self, x, scale):
        x = super().forward(x, scale)
        return x * self.some if len(x) == 2 else x


def changed(change):
    def make():
        model = Network()
        change(model)
        return model

    return make


spare = changed(lambda model: model.layers.__setitem__(1, SpareBlock().double()))
dropping_out = functools.partial(Network, dropout=0.5)
tied = changed(lambda model: setattr(model.layers[2].down, "weight", model.layers[0].down.weight))  # in two blocks
synchronised = changed(lambda model: setattr(model.layers[1], "dropout", nn.SyncBatchNorm(6, dtype=torch.float64)))
borrowing = functools.partial(Network, between=lambda model, x: model.norm(x) + model.layers[-1].down.bias)


def frozen():
    model = Network()
    for part in (model.layers[0], model.layers[2].down.bias):
        part.requires_grad_(False)
    return model


def shard(model, **options):
    return problems.shard(model, *model.layers, **options)


def shard_together(model, *parts):
    """Some parts are sharded together; the other blocks by themselves."""
    chosen = [model.get_submodule(part) for part in parts]
    fully_shard(chosen)
    for layer in model.layers:
        if layer not in chosen:
            fully_shard(layer.up)  # a part of a block by itself
            fully_shard(layer)
    return fully_shard(model)


def step_of(model, optimizer="sgd", **options):
    trained = [p for p in model.parameters() if p.requires_grad]
    options = in_blocks({"micro_batch_size": 3, "blocks": "layers", **options})
    return problems.step_of(model, optimizer, trained, **options)


def weighed(model, x, y):
    """A mean over some rows, which is told with the loss."""
    weights = (x[:, 0] > 0).double()
    losses = cross_entropy(model(x), y, reduction="none")
    return (losses * weights).sum() / weights.sum().clamp(min=1), weights.sum()


TOLD = {"compute_loss": weighed, "loss": lambda m, rows: weighed(m, *rows)[0], "micro_batch_size": 1}
"""Some micro-batches weigh nothing."""
WEIGHED = {**TOLD, "compute_loss": lambda m, x, y: weighed(m, x, y)[0], "weight": lambda x, y: (x[:, 0] > 0).sum()}
SIZES, HYBRID = [[8, 9], [5, 0]], [[8, 3], [5, 7], [0, 1], [4, 9]]
IN_BACKWARD, MICRO_BATCH, CLIPPED = {"update": "in_backward"}, {"sync": "micro_batch"}, {"clip_grad_norm": 0.05}
OFFLOADED, STAYS = {"offload": True}, {"shard": {"reshard_after_forward": False}}
REPLICAS = {"shard": {"shape": (2, 1)}}
ONCE = 3 + 2 + 1  # blocks forward, all but the last backward, all else
EACH = 1 + 2 * 3 + 1 + 2  # on the rank with most, three micro-batches; the last block runs forward once
SENT = {
    # Options, and what each update gathers and reduces, also where rank 1 has no rows; None: not counted.
    "one pass": ({"micro_batch_size": 8}, ONCE, 3 + 1),
    "micro-batches": ({"micro_batch_size": 2}, ONCE, 3 + 1),
    "stay gathered after forward": ({**STAYS, "optimizer": "sgd"}, 4, 4),
    "one block at a time": (MICRO_BATCH, EACH, None),
    "one block at a time, reshard_after_forward=False": ({**MICRO_BATCH, **STAYS}, EACH, None),
    "one block at a time, updated in backward": ({**MICRO_BATCH, **IN_BACKWARD}, EACH, None),
    "one block at a time, frozen and offloaded": ({**MICRO_BATCH, **OFFLOADED, "build": frozen, **CLIPPED}, EACH, None),
    "updated in backward": ({**IN_BACKWARD, "optimizer": "sgd"}, None, 4),
    "updated in backward, frozen, stay gathered": ({**IN_BACKWARD, **STAYS, "build": frozen}, None, None),
    "replicated by fully_shard, updated in backward": ({**REPLICAS, **IN_BACKWARD}, 0, 0),
    "under DDP": ({"shard": "ddp", "blocks": "auto"}, None, None),
    "clipped and offloaded": ({**CLIPPED, **OFFLOADED}, None, None),
    "frozen": ({"build": frozen}, None, None),
    "auto": ({"micro_batch_size": "auto", "memory_limit": "1GiB"}, None, None),
    "tied blocks, sharded together": ({"build": tied, "parts": ("layers.0", "layers.2")}, None, None),
    "a block and the head, sharded together": ({"parts": ("layers.1", "head")}, None, None),
    "weights with the loss, some zero": (TOLD, None, None),
    "weights from the batch, some zero": (WEIGHED, None, None),
    "weights with the loss, updated in backward": ({**TOLD, **IN_BACKWARD}, None, None),
}


def train(rank, build=Network, optimizer="adam", sizes=SIZES, loss=loss_of, **options):
    """The large batch's updates. Returns what was sent in each.

    `shard`: options of `fully_shard`, or "ddp"; `parts` are sharded together.
    """
    how, parts = options.pop("shard", {}), options.pop("parts", ())
    model, oracle, ranks, sent = build(), Oracle(build(), optimizer, options.get("clip_grad_norm")), data(sizes), []
    if how == "ddp":
        used = DistributedDataParallel(model)
    else:
        used = shard_together(model, *parts) if parts else shard(model, **how)
    step = step_of(used, optimizer, **options)
    for i in range(len(sizes[0])):
        with collectives() as counts:
            problems.check_steps(rank, step, oracle, [own[i : i + 1] for own in ranks], loss)
        sent.append(counts)
    return sent


@pytest.mark.parametrize("how", SENT)
@on_ranks()
def test_blocks_make_the_large_batchs_update_and_are_gathered_once_per_pass_and_reduced_once(rank, how):
    options, gathers, scatters = SENT[how]
    for counts in train(rank, **options):
        assert gathers in (None, counts["all_gather"])
        assert scatters in (None, counts["reduce_scatter"])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, CLIPPED, {"build": frozen}], ids=["", "clipped", "frozen"])
@on_ranks("four_ranks")
def test_hybrid_sharded_blocks_make_the_large_batchs_update(rank, options):
    train(rank, sizes=HYBRID, **options)


@pytest.mark.parametrize(("sync", "most"), [("window", 5), ("micro_batch", 2)])
@on_ranks()
def test_all_sharded_blocks_are_whole_in_forward_passes_or_one_and_the_last(rank, sync, most):
    model, found = shard(Network(blocks=5)), []
    for layer in model.layers:
        layer.place.register_forward_pre_hook(
            lambda *_: found.append(sum(not isinstance(each.up.weight, DTensor) for each in model.layers))
        )
    step = step_of(model, sync=sync)
    for rows in data(SIZES)[rank]:
        step(*rows)
    assert max(found) == most


@on_ranks()
def test_under_a_scaler_an_overflow_on_one_rank_costs_all_of_them_one_update(rank):
    oracle, model, ranks = Oracle(Network()), shard(Network()), data([[8, 3, 9], [5, 7, 0]])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    step, scales = step_of(model, scaler=scaler), []
    for i, batches in enumerate(zip(*ranks, strict=True)):
        if i == 1:
            batches[1][0][3, 0] = float("inf")
        else:
            oracle.update(concatenated(batches))
        step(*batches[rank])
        scales.append(scaler.get_scale())
    oracle.check(model)
    assert scales == [1024.0, 512.0, 512.0]


@pytest.mark.parametrize("options", [{}, IN_BACKWARD], ids=["after backward", "in backward"])
@pytest.mark.parametrize("dtypes", [1, 2])
@on_ranks()
def test_a_parameter_of_a_sharded_block_that_no_rank_uses_is_left_alone(rank, options, dtypes):
    """Adam with weight decay moves parameters whose gradient is zero, and none without a gradient."""
    optimizer, policy = "adamw", {}
    if dtypes == 2:
        optimizer = "sgd"
        policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)}
    oracle, model, ranks = Oracle(spare(), optimizer), shard(spare(), **policy), data([[2, 3], [4, 5]])
    step = step_of(model, optimizer, micro_batch_size=2, **options)

    def in_pieces(m, batches):
        """As the step cuts them."""
        rows = sum(len(y) for _, y in batches)
        pieces = [(x[p.rows], y[p.rows]) for x, y in batches for p in Rows(FixedSize(2), len(y))]
        return sum(loss_of(m, piece) * (len(piece[1]) / rows) for piece in pieces)

    for batches in zip(*ranks, strict=True):
        oracle.update(batches, in_pieces)
        step(*batches[rank])
    oracle.check(model, FLOAT64 if dtypes == 1 else FLOAT32)


EVEN = [[6, 9], [6, 9]]
"""Without blocks, all ranks cut their rows into as many micro-batches."""
MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@pytest.mark.parametrize(("build", "mixed"), [(dropping_out, False), (Chain, True)], ids=["dropout", "mixed"])
@on_ranks()
def test_sharded_blocks_draw_the_dropout_masks_and_round_as_accumulation_without_blocks(rank, build, mixed):
    found, expected = [], Oracle(build())
    expected.see(data(EVEN), 1)
    for blocks in ("layers", None):
        model = shard(build().float(), mp_policy=MixedPrecisionPolicy(**MIXED)) if mixed else shard(build())
        step = step_of(model, blocks=blocks)
        torch.manual_seed(rank)
        for x, y in data(EVEN)[rank]:
            step(x.float() if mixed else x, y)
        found.append([p.clone() for p in whole(model)])
    assert relative_error(*found) <= (FLOAT32 if mixed else FLOAT64)
    assert not mixed or 1e-4 < relative_error(found[0], expected.model.parameters()) < 0.1


# What fails on one rank, with blocks and without.

SHELLS = {  # the model, how it is spread, options
    "ddp": (Fragile, DistributedDataParallel, {"blocks": None}),
    "fsdp2": (Fragile, shard, {"blocks": None}),
    **{f"blocks, {sync}": (Network, shard, {"sync": sync}) for sync in SYNCS},
}
SHORT = [("ddp", 1, False), ("ddp", 1, True), ("fsdp2", 1, True)]
SHORT += [(f"blocks, {sync}", 1, backward) for sync in SYNCS for backward in (False, True)]


@pytest.mark.parametrize(
    ("shell", "on", "backward"), slowly(SHORT, [("fsdp2", 0, False), ("fsdp2", 1, False), ("fsdp2", 0, True)])
)
@on_ranks()
def test_a_rank_that_runs_out_of_memory_begins_again_exactly_and_all_do_with_a_sharded_model(rank, shell, on, backward):
    build, spread, options = SHELLS[shell]
    for place in (1, -1) if backward else (0, 1, -1):
        oracle, model = Oracle(build(), "adam"), build()
        used = spread(model)
        if rank == on:
            model.places[place].rows, model.places[place].backward = 2, backward
        step = step_of(used, "adam", micro_batch_size=4, **options)
        problems.check_steps(rank, step, oracle, data([[8, 6], [7, 9]]))
        assert build is Network or sum(p.failures for p in model.places) == (rank == on)  # blocks run in copies
        assert step.micro_batch_size == (2 if shell != "ddp" or rank == on else 4)


OWN, STOPPED = "ArithmeticError: one rank's own", "WindowError: Rank 1 stopped"
NAN, WINDOW = "ValueError: The loss of this batch is nan", "WindowError"
FULL, ELSEWHERE = "OutOfMemoryError: .*no memory", "OutOfMemoryError: .*on rank 1"
FAILURES = {
    # The model and options, what fails on rank 1, what that rank says, and what the other one.
    **{f"{what} of shards": ("fsdp2", {}, what, OWN, STOPPED) for what in ("forward", "backward")},
    **{f"forward, {sync}": (f"blocks, {sync}", {}, "forward", OWN, STOPPED) for sync in SYNCS},
    "backward": ("blocks, window", {}, "backward", OWN, STOPPED),
    "on every rank": ("fsdp2", {}, "everywhere", OWN, OWN),
    "nothing fits": ("fsdp2", {}, "memory", FULL, ELSEWHERE),
    "the reduction": ("fsdp2", {}, "reduction", FULL, ELSEWHERE),
    "nan, in backward": ("blocks, window", IN_BACKWARD, "nan", NAN, NAN),
    "memory, in backward": ("blocks, window", IN_BACKWARD, "memory", WINDOW, WINDOW),
}


@pytest.mark.parametrize("failure", FAILURES)
@on_ranks()
def test_an_error_that_smaller_micro_batches_do_not_help_is_one_on_every_rank_and_the_next_batch_is_exact(
    rank, failure
):
    """In a later micro-batch: nothing of the batch is left, or it says on every rank what has been updated."""
    shell, more, what, own, others = FAILURES[failure]
    build, spread, options = SHELLS[shell]
    halfway = what == "memory" and bool(more)
    oracle, model, ranks = Oracle(build()), spread(build()), data([[6, 5], [7, 4]])
    fails = [what == "everywhere", False]
    (x, y), place, before = ranks[rank][0], model.places[0 if halfway else 1], [p.clone() for p in whole(model)]

    def loss(m, x, y):
        if fails and fails.pop():
            raise ArithmeticError("one rank's own")
        return cross_entropy(m(x), y)

    if rank == 1 and what == "nan":
        x[0, 0] = float("nan")
    elif rank == 1 and what == "reduction":
        layer = model.layers[1]._get_fsdp_state()._fsdp_param_groups[0]._reduce_scatter_comm
        layer.allocate = no_memory
    elif rank == 1 and what != "everywhere":
        place.rows, place.backward = 0, what == "backward" or halfway
        place.error = place.error if what == "memory" else ArithmeticError("one rank's own")
    step, scatter = step_of(model, compute_loss=loss, **options, **more), torch.distributed.reduce_scatter_single
    said = error_of(lambda: step(x, y))
    assert re.match(own if rank == 1 else others, said, re.DOTALL)
    if halfway:
        assert "those of the blocks 'layers.1', 'layers.2'" in said
        assert "This cannot be undone" in said
        assert relative_error(whole(model), before) > 1e-6
        return
    assert relative_error(whole(model), before) == 0.0
    if rank == 1 and what == "reduction":
        del layer.allocate
    place.rows = 999
    assert scatter is torch.distributed.reduce_scatter_single
    problems.check_steps(rank, step, oracle, [own[1:] for own in ranks])


def no_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("no memory for it")


REFUSED = {
    "each rank has only a part of a sharded model": lambda rows: step_of(shard(Network()), on="cpu"),
    "'layers.1.dropout' is a SyncBatchNorm, which waits for the other ranks": lambda rows: step_of(
        shard(synchronised()), batch_norm="micro"
    ),
    "FSDP1), whose parameters `blocks` can't gather": lambda rows: find_blocks(
        FullyShardedDataParallel(Network(), device_id=torch.device("cpu")), "auto"
    ),
    "ranks that replicate a model reduce all gradients together": lambda rows: step_of(
        DistributedDataParallel(Network()), blocks=Blocks("auto", update="in_backward")
    ),
    "shared with a parameter already managed by another FSDP group": lambda rows: step_of(shard(tied()))(*rows),
    "The block 'layers.2' got a gradient after its turn": lambda rows: step_of(shard(borrowing()))(*rows),
}


@pytest.mark.parametrize("says", REFUSED)
@on_ranks()
def test_what_does_not_go_with_blocks_on_several_ranks_is_refused_by_name(rank, says):
    assert says in error_of(lambda: REFUSED[says](data(SIZES)[rank][0]))
