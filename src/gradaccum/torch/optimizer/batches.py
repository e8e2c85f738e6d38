"""Loop over a data loader with gradient accumulation: `optimizer.batches(loader)` knows the epoch's last batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradaccum.errors import WindowError
from gradaccum.on_torch.batch import has_rows, leaves
from gradaccum.torch.optimizer.rows import BatchWeight
from gradaccum.torch.window import Phase, Windows

__all__ = ["Batches"]


class Batches:
    """The loader's batches, unchanged and in order, with one fetched ahead: so the last one is known to be the last.

    Args:
        loader: Any iterable, sized or not; or another optimizer's `Batches`, which are then shared: both see the batch
            that is in use, not the one that is ahead.
        windows: What the batches fill.
        weight: `weight(batch) -> number`; None: the batch's number of rows.
    """

    def __init__(self, loader: Iterable[Any], windows: Windows, weight: Callable[[Any], float] | None = None) -> None:
        if not isinstance(loader, Iterable):
            raise TypeError(f"`loader` must be iterable. Received: loader of type {type(loader).__name__}.")
        self.loader: Iterable[Any] = loader.loader if isinstance(loader, Batches) else loader
        others = loader.members if isinstance(loader, Batches) else []
        if any(windows is other.windows for other in others):
            raise ValueError("The batches of this loader fill this optimizer's windows already.")
        self.members: list[_Member] = [*others, _Member(windows, weight)]
        self._handed_out = 0
        self._to_skip: int | None = None
        """What `load_state_dict` said, until the next loop."""
        self._loader_state: Any = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "batches() belong to their loop and its optimizer, and can't be copied or pickled. Save their "
            "state_dict(), and call optimizer.batches(loader) there."
        )

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # an unsized loader's own error is the right one

    def state_dict(self) -> dict[str, Any]:
        """How many batches of the running epoch have been handed out, and the loader's own state at that point.

        The loader itself is one batch ahead, so its `state_dict()` counts one that has not been trained on.
        """
        return {"batches": self._handed_out, "loader": self._loader_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next loop begin after the batches that had been handed out.

        A loader with a `load_state_dict` goes on from its own state; of any other the first batches are skipped.

        Raises:
            ValueError: It is no state of `batches()`, or of a loader that has a state of its own, as this one hasn't.
        """
        if not isinstance(state, Mapping) or not {"batches", "loader"} <= state.keys():
            found = [*state] if isinstance(state, Mapping) else repr(state)
            raise ValueError(
                f"This is no state of batches(): 'batches' and 'loader' must be in it. Received: {found}. Save "
                "batches.state_dict(), beside the optimizer's."
            )
        if state["loader"] is not None and not hasattr(self.loader, "load_state_dict"):
            raise ValueError(
                "The loader that was saved had a state of its own, and this one can't go on from it: it has no "
                f"load_state_dict(). Received: loader of type {type(self.loader).__name__}."
            )
        self._handed_out = state["batches"]
        self._to_skip = self._handed_out
        if state["loader"] is not None:
            self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]  # it has a state_dict
            self._to_skip = 0

    def __iter__(self) -> Iterator[Any]:
        resumed, to_skip = self._to_skip is not None, self._to_skip or 0
        self._to_skip = None
        if not resumed:
            self._handed_out = 0
        ahead: _Ahead | None = None
        try:
            ahead = self._begin(resumed, to_skip)
            while ahead.arrives() if ahead.knows_end else ahead.failure is None and not ahead.is_empty:
                batch = ahead.batch
                self._loader_state = ahead.fetch()
                for member in self.members:
                    member.expect(batch, ahead.is_over)
                self._handed_out += 1
                yield batch
                for member in self.members:
                    member.pass_on()
                if ahead.is_over:
                    ahead.exhaust()
                    break
            self._finish(ahead, resumed)
        except GeneratorExit:
            assert ahead is not None
            for member in self.members:
                member.break_off(self, ahead)
            raise
        except Exception:  # the batches cannot be used, or a window cannot be closed
            for member in self.members:
                member.windows.ranks.abort()
            raise
        if ahead.failure is not None:
            try:
                raise ahead.failure  # the loader's own: its loop may go on
            finally:
                ahead.failure = None  # no cycle with its traceback: the optimizer goes with the loop that this ends

    def _begin(self, resumed: bool, to_skip: int) -> _Ahead:
        """Fetch the first batch, or go on from what a loop over the same iterator has left."""
        try:
            ahead = self._left_over() or _Ahead(self.loader, to_skip, resumed, self._others_may_have_rows())
        except Exception:
            for member in self.members:
                if member.windows.ranks.is_distributed:  # others wait for this one to begin, then learn that it left
                    member.begin(self, resumed)
            raise
        for member in self.members:
            member.begin(self, resumed)
        return ahead

    def _finish(self, ahead: _Ahead, resumed: bool) -> None:
        """The loop has used the last batch, or its loader has failed."""
        self._handed_out, self._loader_state = 0, None
        took_part = self._end() if ahead.failure is None else []
        if ahead.is_empty and not resumed and not any(took_part):
            raise _empty_error(self.loader)

    def _end(self) -> list[bool]:
        """The loop has used the last batch. Returns for each optimizer whether the epoch had one, on any rank.

        Other ranks may go on, and close more windows. Those of several optimizers come in an order that this rank
        doesn't know, so there they must not.
        """
        ending = [member for member in self.members if member.windows.source is self]
        updates = [member.windows.updates for member in ending]
        for member in ending:
            member.end()
        if len(self.members) > 1:
            for member in ending:
                member.windows.ranks.offer_end()
            for member in ending:
                member.windows.ranks.check_end()
        for member in ending:
            member.windows.join_remaining()
        others = [True] * (len(self.members) - len(ending))  # another loop has begun since
        return others + [member.close(before) for member, before in zip(ending, updates, strict=True)]

    def _others_may_have_rows(self) -> bool:
        """Whether the epoch may be one of other ranks alone: not with an iterator, which may have been used before."""
        ranks = [member.windows.ranks for member in self.members]
        return all(one.is_distributed and not one.sharded for one in ranks) and not isinstance(self.loader, Iterator)

    def _left_over(self) -> _Ahead | None:
        """What the last loop over this iterator had fetched when it was broken off."""
        found = None
        for member in self.members:
            left, member.windows.left_over = member.windows.left_over, None
            if isinstance(left, _Ahead) and left.loader is self.loader and isinstance(self.loader, Iterator):
                found = left
        return found


class _Ahead:
    """A loader's iterator, and the batch that comes next.

    Accelerate's loaders know by themselves whether a batch is the last one, and what reads that in the loop's body
    (`gather_for_metrics`) must not be a batch ahead: of these each batch is fetched when its turn comes.
    """

    def __init__(self, loader: Iterable[Any], to_skip: int, resumed: bool, may_be_empty: bool) -> None:
        self.loader = loader
        self.is_empty = False
        """Whether an epoch that is resumed was over already, or this rank has no batch in it."""
        self.failure: Exception | None = None
        """Raised when the batch in hand has been trained on: it is a good one."""
        self.is_over = False
        self._iterator = iter(loader)
        self.knows_end = hasattr(loader, "end_of_dataloader")
        self._is_due = False
        """Whether the next batch is yet to be fetched, from a loader that knows its end."""
        self._has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._fetched = 0
        try:
            for _ in range(to_skip):
                next(self._iterator)
            to_skip = 0
            self.batch = next(self._iterator)
        except StopIteration:
            if (resumed or may_be_empty) and not to_skip:
                self.is_empty = self.is_over = True
                return
            raise _empty_error(loader, to_skip) from None

    def arrives(self) -> bool:
        """Whether there is a batch to hand out."""
        if self._is_due:
            self._is_due = False
            try:
                self.batch = next(self._iterator)
            except StopIteration:
                self.is_over = True
                return False
            except Exception as error:
                self.failure = error
        return self.failure is None and not self.is_empty

    def exhaust(self) -> None:
        """The last batch has been used: let a loader that knows its end do what it does there.

        Raises:
            WindowError: It has further batches.
        """
        if self.knows_end and next(self._iterator, self) is not self:
            raise WindowError(
                "The loader yielded a batch after the one that it called its last (`end_of_dataloader`), with which "
                "the epoch's last window was closed. Something inside of it fetches ahead: leave that out."
            )

    def fetch(self) -> Any:
        """Fetch the next batch. Returns the loader's own state before that, if it has one.

        Raises:
            ValueError: That changed the batch before.
        """
        state = _state_of(self.loader) if self._has_state else None
        if self.knows_end:
            self.is_over = bool(self.loader.end_of_dataloader)  # type: ignore[attr-defined]  # it has
            self._is_due = not self.is_over
            return state
        self._fetched += 1
        looks = self._fetched & (self._fetched - 1) == 0  # a loader that refills its batches does so from the start
        before = _Contents(self.batch) if looks else None
        try:
            self.batch = next(self._iterator)
        except StopIteration:
            self.is_over = True
        except Exception as error:
            self.failure = error
        else:
            if before is not None and before.changed():
                raise ValueError(
                    "Fetching the next batch changed the one in use: the loader refills a buffer, or the container "
                    "that it yields, and batches() fetches one batch ahead. Yield new ones: buffer.clone(), or "
                    "dict(batch); or leave out batches(), and call flush() at the epoch's end."
                )
        return state


def _empty_error(loader: Any, to_skip: int = 0) -> ValueError:
    return ValueError(
        f"The loader yielded no batch{f' after the {to_skip} to be skipped' if to_skip else ''}. Received: "
        f"loader of type {type(loader).__name__}. An iterator can be used only once; pass what makes a new "
        "one for each epoch."
    )


def _state_of(loader: Any) -> Any:
    """What the loader can go on from; None where it has no state, and its first batches are to be skipped."""
    try:
        return copy.deepcopy(loader.state_dict())
    except (AttributeError, NotImplementedError):  # Accelerate's has the method whether its inner loader has or not
        return None


class _Contents:
    """The tensors of a batch as they are now."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._tensors = _tensors(batch)
        self._versions = [tensor._version for tensor in self._tensors]
        self._copies = [tensor.clone() for tensor in self._tensors]  # NumPy does not count versions

    def changed(self) -> bool:
        """Whether the batch holds other tensors by now, or other numbers in them."""
        now = _tensors(self._batch)
        if len(now) != len(self._tensors):
            return True
        found = zip(now, self._tensors, self._versions, self._copies, strict=True)
        for one, before, version, copied in found:
            # Arrays are made into new tensors each time.
            if one is not before and (one.shape != before.shape or one.data_ptr() != before.data_ptr()):
                return True
            if before._version != version or not _same_values(before, copied):
                return True
        return False


def _same_values(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and torch.allclose(one, other, 0, 0, equal_nan=True)


def _tensors(batch: Any) -> list[Tensor]:
    """The plain tensors of a batch, arrays among them."""
    flat = batch.values() if type(batch) is dict else batch if type(batch) in (tuple, list) else ()
    found = [leaf for leaf in flat if type(leaf) is Tensor and leaf.layout is torch.strided]
    if found and len(found) == len(flat):
        return found
    found = []
    for _, leaf in leaves(batch):
        if type(leaf) is Tensor and leaf.layout is torch.strided:
            found.append(leaf)
        elif hasattr(leaf, "__array_interface__") and has_rows(leaf) and leaf.dtype.kind in "biuf":
            found.append(torch.as_tensor(leaf))
    return found


class _Member:
    """An optimizer's windows, and what the batches of an epoch mean for them."""

    def __init__(self, windows: Windows, weight: Callable[[Any], float] | None) -> None:
        self.windows = windows
        self.weigh = BatchWeight(weight)
        self._given = weight is not None
        self._first_unused: bool | None = None

    def begin(self, batches: Batches, resumed: bool) -> None:
        """The first batch is there."""
        windows = self.windows
        before, phase = windows.source, windows.phase
        windows.source, windows.phase, self._first_unused = None, Phase.PLAIN, None
        if phase is Phase.RESTORED or resumed:
            pass
        elif before is None:
            windows.flush()  # left over by a plain loop; the window ends with its epoch
        elif not (
            isinstance(before, Batches) and isinstance(before.loader, Iterator) and before.loader is batches.loader
        ):
            # The loop before was left by an exception. An iterator goes on where it was; a loader starts over.
            windows.discard()
        windows.begin_loop(batches)

    def expect(self, batch: Any, last: bool) -> None:
        """A batch is about to be handed out."""
        weight, windows = self.weigh(batch), self.windows
        if not windows.ranks.is_distributed:
            windows.current.expect(weight, self._given, last)
            return
        windows.ranks.agree_on_last(last)
        windows.current.expect(weight, self._given, last)
        windows.expect_next(counts=weight > 0)

    def pass_on(self) -> None:
        """The next batch is asked for."""
        current = self.windows.current
        announced = current.window.micro_batch.announced
        if self._first_unused is None:
            self._first_unused = announced
        if announced or current.special or current.monitor.looking or current.monitor.arrivals:
            current.skip()

    def end(self) -> None:
        """The loop has used the last batch."""
        windows = self.windows
        windows.phase = Phase.ENDING
        windows.ranks.end_epoch()
        if windows.current.window.micro_batches:
            windows.flush()  # the last micro-batch was skipped

    def close(self, updates: int) -> bool:
        """The epoch is over on all ranks. Returns whether it had a batch on any; `updates` were made before its end."""
        windows = self.windows
        in_epoch = windows.in_epoch
        windows.end_loop(ahead=bool(self._first_unused))
        if windows.updates > updates:
            windows.may_have_missed()
        return in_epoch

    def break_off(self, batches: Batches, ahead: _Ahead) -> None:
        """The loop was left before its end."""
        windows, window = self.windows, self.windows.current.window
        if windows.source is not batches:
            return
        windows.ranks.abort()
        if window.micro_batches or window.micro_batch.weight is not None:
            windows.discard()
        windows.end_loop(ahead=False)
        if not ahead.is_over:
            windows.left_over = ahead
