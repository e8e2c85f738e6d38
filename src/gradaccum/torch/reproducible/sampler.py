"""The rows of each global batch, cut into micro-batches and dealt out to the ranks, however many there are."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler, default_collate

from gradaccum.on_torch.batch import Batch
from gradaccum.schedule import checked_count
from gradaccum.torch.reproducible.seeds import derived_seed

logger = logging.getLogger("gradaccum")

_iterated: weakref.WeakSet[GlobalBatchSampler] = weakref.WeakSet()

_NO_ROWS = (
    "The last global batch has fewer micro-batches (%d) than there are ranks (%d), so some ranks get an empty list of "
    "rows, which torch's default_collate refuses. Pass collate_fn=sampler.collate to DataLoader, or drop_last=True."
)


class GlobalBatchSampler(Sampler[list[int]]):
    """This rank's rows of each global batch, for `DataLoader(..., batch_sampler=)`.

    The order of rows depends on `seed` and the epoch alone. A global batch is cut into micro-batches of
    `micro_batch_size` rows, the last of them perhaps shorter, and each rank gets whole micro-batches, consecutive ones,
    as evenly as possible: of 8 over 3 ranks 3, 3 and 2. So the micro-batches are the same on any number of ranks.

    Iterating again is the next epoch. Without torch.distributed there is one rank.

    Args:
        data_source: What has the rows: anything with a length, or their number.
        batch_size: Rows of a global batch, over all ranks. The last one may be shorter.
        micro_batch_size: Rows of a micro-batch, the same as `TrainStep`'s.
        shuffle: Whether to shuffle the rows in each epoch.
        seed: What the order of rows depends on.
        drop_last: Whether to leave out a last batch that is shorter.
        rank: This process's place among the ranks; default: torch.distributed's.
        ranks: How many there are; default: torch.distributed's.

    Raises:
        TypeError, ValueError: An argument is invalid.

    Example:
        >>> sampler = GlobalBatchSampler(10, batch_size=8, micro_batch_size=2, shuffle=False, rank=0, ranks=3)
        >>> list(sampler), len(sampler)
        ([[0, 1, 2, 3], [8, 9]], 2)
        >>> list(GlobalBatchSampler(10, batch_size=8, micro_batch_size=2, shuffle=False, rank=1, ranks=3))
        [[4, 5], []]
    """

    def __init__(
        self,
        data_source: Sized | int,
        batch_size: int,
        micro_batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        if isinstance(data_source, bool) or not isinstance(data_source, int | Sized):
            raise TypeError(
                "`data_source` must have a length, or be the number of rows. "
                f"Received: data_source of type {type(data_source).__name__}."
            )
        self._source, self._rows = data_source, data_source if isinstance(data_source, int) else len(data_source)
        if self._rows < 0:
            raise ValueError(f"`data_source` must have at least 0 rows. Received: {self._rows}.")
        self.batch_size = checked_count(batch_size, "batch_size")
        """Rows of a global batch."""
        self.micro_batch_size = checked_count(micro_batch_size, "micro_batch_size")
        """Rows of a micro-batch."""
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"`seed` must be an int. Received: seed={seed!r} of type {type(seed).__name__}.")
        if (rank is None) != (ranks is None):
            raise ValueError(f"Give both `rank` and `ranks`, or none. Received: rank={rank!r}, ranks={ranks!r}.")
        if ranks is not None and not 0 <= rank < checked_count(ranks, "ranks"):  # type: ignore[operator]  # both are given
            raise ValueError(f"`rank` must be at least 0 and less than `ranks`. Received: rank={rank}, ranks={ranks}.")
        self._shuffle, self._seed, self._drop_last = bool(shuffle), seed, bool(drop_last)
        self._place = None if rank is None or ranks is None else (rank, ranks)
        self._epoch, self._batches = 0, 0  # of the epoch that runs, or comes next: how many batches were handed out
        self._resumes = False  # whether the next loop goes on in this epoch
        self._next = 0

    def __len__(self) -> int:
        """The number of global batches in an epoch."""
        return self._rows // self.batch_size if self._drop_last else -(-self._rows // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        # A generator: DataLoader makes iterators that it never uses, and only one that is used begins an epoch.
        _iterated.add(self)
        if not self._resumes:
            self._epoch, self._batches = self._next, 0
        self._resumes, self._next = False, self._epoch + 1
        epoch, order = self._epoch, self._order()
        rank, ranks = self._ranks()
        if ranks > 1:
            self._look_at_last(ranks)
        for batch in range(self._batches, len(self)):
            if self._epoch == epoch:  # no other loop has begun since
                self._batches = batch + 1
            rows = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            micro_batches = -(-len(rows) // self.micro_batch_size)
            start, stop = (self.micro_batch_size * _share(micro_batches, place, ranks) for place in (rank, rank + 1))
            yield rows[start:stop]

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._rows))
        generator = torch.Generator().manual_seed(derived_seed(self._seed, self._epoch))
        order: list[int] = torch.randperm(self._rows, generator=generator).tolist()
        return order

    def _ranks(self) -> tuple[int, int]:
        if self._place is not None:
            return self._place
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1

    def _look_at_last(self, ranks: int) -> None:
        rest = 0 if self._drop_last else self._rows % self.batch_size
        least = -(-(rest or min(self._rows, self.batch_size)) // self.micro_batch_size)
        if least < ranks:
            logger.info(_NO_ROWS, least, ranks)

    def collate(self, rows: list[Any]) -> Any:
        """As torch's `default_collate`, for `DataLoader(..., collate_fn=)`: without `rows`, a batch of no rows."""
        if rows or isinstance(self._source, int):
            return default_collate(rows)
        batch: Any = default_collate([self._source[0]])  # type: ignore[index]  # a map-style dataset
        return Batch(batch).take(slice(0, 0)).tree

    def set_epoch(self, epoch: int) -> None:
        """Have the next loop be this `epoch`, from its beginning."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"`epoch` must be an int >= 0. Received: epoch={epoch!r}.")
        self._next, self._resumes = epoch, False
        self._epoch, self._batches = epoch, 0

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Where the epoch stands, to go on from there on any number of ranks.

        Args:
            batches: How many of the epoch's batches have been trained on. Default: as many as were handed out, which is
                right for a `DataLoader` without workers, and for torchdata's `StatefulDataLoader`, which counts by
                itself. Workers of a `DataLoader` fetch `num_workers * prefetch_factor` batches ahead, so count them in
                your loop then.
        """
        if batches is not None and not 0 <= checked_count(batches, "batches", 0) <= len(self):
            raise ValueError(
                f"`batches` must be at most the {len(self)} batches of an epoch. Received: batches={batches}."
            )
        return {"epoch": self._epoch, "batches": self._batches if batches is None else batches, **self._identity()}

    def _identity(self) -> dict[str, Any]:
        return {
            "rows": self._rows,
            "batch_size": self.batch_size,
            "micro_batch_size": self.micro_batch_size,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "drop_last": self._drop_last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next loop continue from `state`, which `state_dict` returned; after a complete epoch, in the next.

        Raises:
            ValueError: `state` is none of a `GlobalBatchSampler`, or of one with other rows, sizes or another seed.
        """
        identity = self._identity()
        if not isinstance(state, Mapping) or not {"epoch", "batches", *identity} <= state.keys():
            found = [*state] if isinstance(state, Mapping) else repr(state)
            raise ValueError(
                f"This is no state of a GlobalBatchSampler: {', '.join(map(repr, ('epoch', 'batches', *identity)))} "
                f"must be in it. Received: {found}. Save sampler.state_dict()."
            )
        for name, value in identity.items():
            if state[name] != value:
                raise ValueError(
                    f"The saved state was made with {name}={state[name]!r}, and this sampler has {name}={value!r}: it "
                    "would hand out other rows. Build the sampler as it was then; only the number of ranks may differ."
                )
        self._epoch, self._batches = state["epoch"], state["batches"]
        self._resumes = self._batches < len(self)
        if not self._resumes:
            self._next = self._epoch + 1


def _share(micro_batches: int, place: int, ranks: int) -> int:
    """How many of so many micro-batches the ranks before this place have."""
    each, more = divmod(micro_batches, ranks)
    return place * each + min(place, more)


def check_micro_batch_size(size: int) -> None:
    """Raise a ValueError where this process draws its rows from samplers that all cut other micro-batches."""
    sizes = {sampler.micro_batch_size for sampler in _iterated}
    if sizes and size not in sizes:
        raise ValueError(
            f"GlobalBatchSampler and TrainStep must have the same `micro_batch_size`. Received: {min(sizes)} in the "
            f"sampler, {size} in the step. Other micro-batches would be other sums on another number of ranks."
        )
