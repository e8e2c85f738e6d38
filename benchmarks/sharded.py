"""TrainStep on a sharded model, two ranks (FSDP2 over gloo): what its messages cost, and how long ranks idle."""

import contextlib
import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from benchmarks.harness import WARM_UP, Ratio, arguments, on_ranks, publish, ratio_of, recorded, table
from gradaccum.core.sizes import Tokens
from gradaccum.torch import TrainStep
from gradaccum.torch.distributed.fsdp import Shards

RANKS, ROWS, COLUMNS, MAX_TOKENS = 2, 32, 96, 384


class Model(nn.Module):
    """Blocks over the tokens of a text, each sharded by itself."""

    def __init__(self, blocks: int = 6, width: int = 192) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )
        for part in [self.embedding, *self.blocks, self.head, self]:
            fully_shard(part)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids.flatten())
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x), labels.flatten(), ignore_index=-100)


def text(lengths: list[int]) -> dict[str, Tensor]:
    mask = (torch.arange(COLUMNS) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1, 256, (len(lengths), COLUMNS)) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def drawn(window: int) -> list[list[int]]:
    """The lengths of each rank's rows: log-normal, as those of documents are."""
    draw = random.Random(window)
    return [[min(max(int(draw.lognormvariate(3.0, 0.8)), 2), COLUMNS) for _ in range(ROWS)] for _ in range(RANKS)]


def dealt(lengths: list[list[int]]) -> list[list[int]]:
    """The same rows, exchanged so that all ranks have about the same tokens."""
    ranks: list[list[int]] = [[] for _ in lengths]
    for length in sorted((length for own in lengths for length in own), reverse=True):
        min(ranks, key=sum).append(length)
    return ranks


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def step_of(*, verify: bool = False, **keywords: Any) -> TrainStep:
    model = Model()
    return TrainStep(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        compute_loss=lambda m, batch: m(**batch),
        weight=lambda batch: (batch["labels"] != -100).sum(),
        verify=verify,
        **keywords,
    )


def as_packed(plan: Tokens, count: int, least: int = 1) -> list[Any]:
    """The pieces by the whole budget, however many the other ranks have: passes that count nothing make up for it."""
    return list(plan)


def measured(
    rank: int, rounds: int, windows: int, warm_up: int
) -> tuple[dict[str, list[float]], dict[str, float], list[float]]:
    """Seconds of each contender's rounds, the part of the passes that ranks idle, and windows that are proven."""
    lengths = [drawn(window) for window in range(windows)]
    own = [text(window[rank]) for window in lengths]
    even = [text(dealt(window)[rank]) for window in lengths]
    fixed, packing, plain = step_of(micro_batch_size=16), step_of(max_tokens=MAX_TOKENS), contextlib.nullcontext
    contenders: dict[str, tuple[TrainStep, Any, Callable[[], Any]]] = {
        "TrainStep": (fixed, own, plain),
        "without its messages": (fixed, own, functools.partial(replaced, Shards, "ask_before", lambda *_: None)),
        "own rows, as many passes of the same cost": (packing, own, plain),
        "own rows, by the whole budget": (packing, own, functools.partial(replaced, Tokens, "in_passes", as_packed)),
        "rows exchanged beforehand": (packing, even, plain),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    shuffle = random.Random(0)
    for round_ in range(-(-warm_up // windows) + rounds):
        for name in shuffle.sample(list(contenders), len(contenders)):
            step, batches, context = contenders[name]
            dist.barrier()
            start = time.perf_counter()
            with context():
                for batch in batches:
                    step(batch)
            dist.barrier()
            if round_ * windows >= warm_up:
                times[name].append(time.perf_counter() - start)
    idle = {name: idling(lengths, name) for name in list(contenders)[2:]}
    proving, taken = step_of(verify=True, micro_batch_size=16), []
    for number in range(16):
        dist.barrier()
        start = time.perf_counter()
        proving(own[number % windows])
        dist.barrier()
        taken.append(time.perf_counter() - start)
    ordinary = statistics.median(seconds for number, seconds in enumerate(taken, 1) if number & (number - 1))
    return times, idle, [taken[number - 1] / ordinary for number in (4, 8, 16)]


def idling(windows: list[list[list[int]]], name: str) -> float:
    """The part of all ranks' passes in which a rank has fewer tokens to compute than the one with the most."""
    from gradaccum.core.sizes import TokenBudget

    worked = waited = 0
    for lengths in windows:
        ranks = dealt(lengths) if "exchanged" in name else lengths
        plans = [Tokens(TokenBudget(MAX_TOKENS), [(0, length) for length in own]) for own in ranks]
        most = max(len(list(plan)) for plan in plans)
        pieces = [list(plan) if "whole" in name else plan.in_passes(most) for plan in plans]
        for at in range(most):
            costs = [own[at].tokens if at < len(own) else 0 for own in pieces]
            worked += sum(costs)
            waited += sum(max(costs) - cost for cost in costs)
    return waited / (worked + waited)


def main() -> None:
    options = arguments(__doc__)
    rounds, windows, warm_up = (2, 2, 2) if options.quick else (15, 4, WARM_UP)
    times, idle, proven = on_ranks(measured, RANKS, rounds, windows, warm_up)
    lines = []
    for rival, names in (
        ("without its messages", ["TrainStep", "without its messages"]),
        ("rows exchanged beforehand", list(idle)),
    ):
        ratios: dict[str, Ratio] = {
            name: ratio_of([mine / theirs for mine, theirs in zip(times[name], times[rival], strict=True)])
            for name in names
        }
        recorded(ratios, rival, rounds, f"2 ranks, FSDP2, {ROWS} rows a window")
        lines += [[name, ratios[name], f"{100 * idle[name]:.1f} %" if name in idle else ""] for name in names]
    about = (
        f"{RANKS} ranks over gloo, {ROWS} rows a window on each, of log-normal lengths; six blocks, an embedding and a "
        "head, each sharded by itself. First micro-batches of 16 padded rows, with and without messages before "
        f"collectives; then `max_tokens` of {MAX_TOKENS}, relative to rows dealt out evenly beforehand. Medians of "
        f"{rounds} rounds; idle: tokens that ranks could have computed.\n\n"
    )
    body = about + table(["", "time", "idle"], lines)
    looks = ratio_of(proven)
    body += f"\n\nAll with `verify=False`. A window that is proven takes {looks} ordinary ones."
    publish("sharded", "Sharded models", body, ["torch"], options, ours=["TrainStep"])


if __name__ == "__main__":
    main()
