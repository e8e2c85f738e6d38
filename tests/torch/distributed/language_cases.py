"""What each rank does in the tests of TrainStep's `head` and `pack` on several ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradaccum.torch import TrainStep, head
from tests.torch.distributed.problems import OPTIMIZERS, Oracle
from tests.torch.distributed.together_cases import Tagger, text, token_mean

LENGTHS = [[16, 15, 9, 12, 16, 14, 3, 11], [2, 3, 1, 5, 4, 2]]
"""Of the rows, on each rank."""


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found = model(batch)
    return found if found.dim() == 0 else token_mean(found, batch)


def several(model: Tagger, engine: str) -> Any:
    """The model over all ranks: replicated, or sharded in the parts that `engine` names."""
    if engine == "DDP":
        return DistributedDataParallel(model)
    parts: dict[str, list[nn.Module]] = {
        "at once": [],
        "the head with the rest": [model.embedding, model.middle],
        "the head by itself": [model.embedding, model.middle, model.head],
        "outputs cast": [model.head],
    }
    policy = MixedPrecisionPolicy(output_dtype=torch.float64 if engine == "outputs cast" else None)
    for part in parts[engine]:
        fully_shard(part, mp_policy=policy)
    return fully_shard(model, reshard_after_forward=True, mp_policy=policy)


def laid(batch: dict[str, Tensor], rows: list[list[int]]) -> dict[str, Tensor]:
    """Rows one behind the other."""
    found = {}
    for name, filler in (("input_ids", 0), ("labels", -100)):
        lines = [torch.cat([batch[name][row][batch["attention_mask"][row] != 0] for row in pack]) for pack in rows]
        found[name] = nn.utils.rnn.pad_sequence(lines, batch_first=True, padding_value=filler)
    return found


def updates(
    rank: int, engine: str, own_loss: bool = True, clip: float | None = None, lengths: Any = LENGTHS, **keywords: Any
) -> tuple[float, float, int, list[int]]:
    """Three updates of a language model on ragged rows. Returns (error, that of the losses, tiles, tokens)."""
    model = Tagger(own_loss)
    oracle = Oracle(model, "adam", clip)
    seen: list[int] = []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]["input_ids"].numel()))
    wide = several(model, engine)
    counted = _counting_tiles()
    if keywords.get("pack"):
        keywords["pack"] = laid
    step = TrainStep(
        wide,
        OPTIMIZERS["adam"](wide.parameters()),
        compute_loss=loss_of,
        weight=lambda batch: (batch["labels"] != -100).sum(),
        clip_grad_norm=clip,
        verify=False,
        **keywords,
    )
    worst = 0.0
    for update in range(3):
        batches = [text(own, 10 * update + r) for r, own in enumerate(lengths)]
        rows: Any = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        expected = loss_of(oracle.model, rows).item()
        oracle.update(rows, loss_of)
        seen.clear()
        worst = max(worst, abs(step(batches[rank]).item() - expected) / expected)
    return oracle.error(wide), worst, counted(), seen


def _counting_tiles() -> Callable[[], int]:
    """Tiles of few rows, and how many were computed in forward passes."""
    original, numbers, found = head.cross_entropies, head.NUMBERS, []

    def counting(*arguments: Any) -> Tensor:
        *others, losses = arguments

        def counted(tile: Tensor, target: Tensor) -> Tensor:
            found.append(len(tile))
            return losses(tile, target)

        return original(*others, counted)

    head.cross_entropies, head.NUMBERS = counting, 5 * 20

    def stop() -> int:
        head.cross_entropies, head.NUMBERS = original, numbers
        return len(found)

    return stop
