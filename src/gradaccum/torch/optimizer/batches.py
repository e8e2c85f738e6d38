"""Loop over a data loader with gradient accumulation: `optimizer.batches(loader)` knows the epoch's last batch."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.weak import WeakIdKeyDictionary

from gradaccum.core.window import checked_weight
from gradaccum.errors import WindowError
from gradaccum.on_torch.batch import children, has_rows, leaves, number_of_rows
from gradaccum.torch.window import Windows

T = TypeVar("T")
"""What a loader yields."""

logger = logging.getLogger("gradaccum")


class Batches(Generic[T]):
    """The loader's batches, unchanged and in order, with one fetched ahead: so the last one is known to be the last.

    Args:
        loader: Any iterable, sized or not.
        windows: What the batches fill.
        weight: `weight(batch) -> number`; None: the batch's number of rows.
    """

    def __init__(self, loader: Iterable[T], windows: Windows, weight: Callable[[T], float] | None = None) -> None:
        if not isinstance(loader, Iterable):
            raise TypeError(f"`loader` must be iterable. Received: loader of type {type(loader).__name__}.")
        if isinstance(loader, Batches):
            raise ValueError(
                "`loader` is a loop of batches() already, and one loop fills one optimizer's windows. Pass the loader "
                "itself; for several optimizers wrap them in one: Optimizer([a, b], steps=4)."
            )
        self.loader: Iterable[T] = loader
        self._windows, self._weigh = windows, BatchWeight(weight)
        self._handed_out = 0
        self._to_skip: int | None = None  # what `load_state_dict` said, until the next loop
        self._loader_state: Any = None
        self._warned = False

    def __repr__(self) -> str:
        return f"<batches of a {type(self.loader).__name__}, {self._handed_out} handed out>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "batches() belong to their loop and its optimizer, and can't be copied or pickled. Save their "
            "state_dict(), and call optimizer.batches(loader) there."
        )

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # an unsized loader's own error is the right one

    def state_dict(self) -> dict[str, Any]:
        """How many batches of the running epoch have been handed out, and the loader's own state at that point.

        The loader itself is one batch ahead, so its `state_dict()` counts one that has not been trained on. Call this
        after `step()`: the batch in hand counts as handed out.
        """
        windows = self._windows
        waits = windows.source is self and windows.one.announced and windows.current.in_progress[0]
        if waits and not self._warned:
            self._warned = True
            logger.warning(
                "batches.state_dict() was called before step() has counted the batch in hand, which is left out when "
                "training goes on from there. Call it after step()."
            )
        return {"batches": self._handed_out, "loader": self._loader_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next loop begin after the batches that had been handed out.

        A loader with a `load_state_dict` goes on from its own state; of any other the first batches are skipped.

        Raises:
            ValueError: `state` doesn't come from `batches()`; or it holds a loader's state that this loader can't load.
        """
        if not isinstance(state, Mapping) or not {"batches", "loader"} <= state.keys():
            found = [*state] if isinstance(state, Mapping) else repr(state)
            raise ValueError(
                f"This is no state of batches(): 'batches' and 'loader' must be in it. Received: {found}. Save "
                "batches.state_dict() with the optimizer's."
            )
        if state["loader"] is not None and not hasattr(self.loader, "load_state_dict"):
            raise ValueError(
                "The saved state contains a loader's state, but this loader can't load it: it has no "
                f"load_state_dict(). Received: loader of type {type(self.loader).__name__}."
            )
        self._to_skip = self._handed_out = state["batches"]
        if state["loader"] is not None:
            self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]  # it has a state_dict
            self._to_skip = 0

    def goes_on_in(self, other: Batches) -> bool:
        return isinstance(self.loader, Iterator) and self.loader is other.loader

    def __iter__(self) -> Iterator[T]:
        resumed = self._to_skip is not None
        windows, weigh = self._windows, self._weigh
        passes, one = windows.passes, windows.one
        ahead: _Ahead | None = None
        try:
            ahead, first = self._begin(resumed), True
            while ahead.has_next or ahead.arrives():
                batch = ahead.batch
                self._loader_state = ahead.look_ahead()
                windows.expect_batch(weigh(batch), weigh.given, ahead.is_over)
                self._handed_out += 1
                yield batch
                if windows.source is not self:
                    windows.go_on_in(self)
                if first or passes.arrivals or one.announced:
                    windows.end_batch()
                first = False
            ahead.exhaust()
            self._handed_out, self._loader_state = 0, None
            took_part = ahead.failure is None and self._end()
            if ahead.is_empty and not resumed and not took_part:
                raise _empty_error(self.loader)
        except GeneratorExit:
            self._break_off(ahead)
            raise
        except Exception:  # the batches cannot be used, or a window cannot be closed
            windows.abort()
            raise
        if ahead.failure is not None:
            try:
                raise ahead.failure  # the loader's own: its loop may go on
            finally:
                ahead.failure = None  # no cycle with its traceback: the optimizer goes with the loop that this ends

    def _begin(self, resumed: bool) -> _Ahead:
        """Fetch the first batch, or go on from what a loop over the same iterator has left."""
        windows, once = self._windows, isinstance(self.loader, Iterator)
        to_skip, self._to_skip = self._to_skip or 0, None
        if not resumed:
            self._handed_out = 0
        left, windows.left_over = windows.left_over, None
        ahead: _Ahead | None = left if once and left is not None and left.loader is self.loader else None
        if ahead is None:
            # An epoch may be one of other ranks alone: not with an iterator, which may have been used before.
            ahead = _Ahead(self.loader, to_skip, may_be_empty=resumed or (windows.may_have_none and not once))
        windows.begin_loop(self, resumed)
        if windows.window.is_open and windows.window.rows and not (resumed or once or left is not None):
            logger.warning(
                "This loop goes on with a window that a checkpoint holds, and begins with the loader's first batch. If "
                "that one was trained on before, call batches.load_state_dict() with the place that was saved."
            )
        return ahead

    def _break_off(self, ahead: _Ahead | None) -> None:
        windows = self._windows
        if windows.source is self:
            windows.break_off()
            windows.left_over = ahead if ahead is not None and not ahead.is_over else None

    def _end(self) -> bool:
        """The loop has used the last batch. Returns whether the epoch had one, on any rank."""
        windows = self._windows
        if windows.source is not self:
            return True  # another loop has begun since
        windows.end_loop()
        return windows.end_epoch()


_FETCHED: Any = WeakIdKeyDictionary()  # a tensor is a loader of its rows, and compares them
"""How many batches of a loader had been fetched, in all epochs, when the last one was compared with its copy."""


class _Ahead:
    """A loader's iterator, and the batch that comes next.

    Accelerate's loaders know by themselves whether a batch is the last one, and what reads that in the loop's body
    (`gather_for_metrics`) must not be a batch ahead: of these each batch is fetched when its turn comes.
    """

    def __init__(self, loader: Iterable[Any], to_skip: int, may_be_empty: bool) -> None:
        self.loader, self._iterator = loader, iter(loader)
        self.failure: Exception | None = None  # raised when the batch in hand has been trained on: it is a good one
        self.is_over = self.is_empty = False  # nothing comes after the batch in use; nothing has come at all
        self._knows_end = hasattr(loader, "end_of_dataloader")
        self._has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._fetched = 0
        with contextlib.suppress(TypeError):  # no weak reference: an epoch is all that is known of it
            self._fetched = _FETCHED.get(loader, 0)
        # At 1, 2, 4, 8, ... batches it is looked at whether the loader refills one. A list doesn't.
        self._look_at: float = math.inf if type(loader) in (list, tuple) else 1 << self._fetched.bit_length()
        self._plain_until = 0 if self._knows_end or self._has_state else self._look_at
        self.has_next = True
        try:
            for _ in range(to_skip):
                next(self._iterator)
            to_skip = 0
            self.batch = next(self._iterator)
        except StopIteration:
            if not may_be_empty or to_skip:
                raise _empty_error(loader, to_skip) from None
            self.has_next, self.is_empty, self.is_over = False, True, True

    def arrives(self) -> bool:
        """Fetch the batch whose turn it is, if it has not been fetched ahead. Returns whether there is one."""
        if self._knows_end and not self.is_over and self.failure is None:
            self._fetch()
        return self.has_next

    def _fetch(self) -> None:
        try:
            self.batch, self.has_next = next(self._iterator), True
        except StopIteration:
            self.has_next, self.is_over = False, True
        except Exception as error:
            self.has_next, self.failure = False, error

    def look_ahead(self) -> Any:
        """Fetch the next batch. Returns the loader's own state before that, if it has one.

        Raises:
            ValueError: That changed the batch before.
        """
        self._fetched += 1
        if self._fetched < self._plain_until:  # nearly always
            try:
                self.batch = next(self._iterator)
            except StopIteration:
                self.has_next, self.is_over = False, True
            except Exception as error:
                self.has_next, self.failure = False, error
            return None
        state = _state_of(self.loader) if self._has_state else None
        if self._knows_end:
            self.has_next, self.is_over = False, bool(self.loader.end_of_dataloader)  # type: ignore[attr-defined]
            return state
        if self._fetched < self._look_at:
            self._fetch()
            return state
        self._look_at *= 2
        self._plain_until *= 2
        with contextlib.suppress(TypeError):
            _FETCHED[self.loader] = self._fetched
        batch, before = self.batch, _contents(self.batch)  # a loader that refills its batches does so from the start
        self._fetch()
        if self.has_next and _contents_changed(batch, before):
            raise ValueError(
                "Fetching the next batch changed the one in use: the loader refills a buffer, or the container "
                "that it yields, and batches() fetches one batch ahead. Yield new ones, buffer.clone() or dict(batch); "
                "or loop over the loader itself and call flush() at the epoch's end."
            )
        return state

    def exhaust(self) -> None:
        """The last batch has been used: let a loader that knows its end do what it does there.

        Raises:
            WindowError: It has further batches.
        """
        if self._knows_end and self.failure is None and not self.is_empty and next(self._iterator, self) is not self:
            raise WindowError(
                "The loader set `end_of_dataloader` and then yielded another batch, after the epoch's last window had "
                "been closed. Something inside the loader fetches ahead: remove it."
            )


def _empty_error(loader: Any, to_skip: int = 0) -> ValueError:
    return ValueError(
        f"The loader yielded no batch{f' after the {to_skip} to be skipped' if to_skip else ''}. Received: loader of "
        f"type {type(loader).__name__}. An iterator can be used only once; pass an iterable that makes a new one for "
        "each epoch."
    )


def _state_of(loader: Any) -> Any:
    """What the loader can go on from; None where it has no state, and its first batches are to be skipped."""
    try:
        return copy.deepcopy(loader.state_dict())
    except (AttributeError, NotImplementedError):  # Accelerate's has the method whether its inner loader has or not
        return None


def _contents(batch: Any) -> list[tuple[Tensor, Any, Tensor]]:
    """The plain tensors of a batch, arrays among them: where each is, and what is in it."""
    found = []
    for _, leaf in leaves(batch):
        if hasattr(leaf, "__array_interface__") and has_rows(leaf) and leaf.dtype.kind in "biuf":
            leaf = torch.as_tensor(leaf)
        if type(leaf) is Tensor and leaf.layout is torch.strided:
            values = leaf.clone().resolve_conj().flatten().view(torch.uint8)  # NumPy counts no versions
            found.append((leaf, (leaf.data_ptr(), leaf.shape, leaf._version), values))
    return found


def _contents_changed(batch: Any, before: list[tuple[Tensor, Any, Tensor]]) -> bool:
    now = _contents(batch)
    places = [place for _, place, _ in now] == [place for _, place, _ in before]
    return not (places and all(torch.equal(a, b) for (_, _, a), (_, _, b) in zip(now, before)))


_SHAPE = operator.attrgetter("shape")
_CHANNELS = (1, 3, 4)
"""Sizes of a first dimension that may be an image's channels in place of rows."""


class BatchWeight:
    """Weighs the batches of a loader, one after the other.

    Example:
        >>> import torch
        >>> BatchWeight()((torch.zeros(16, 3), torch.zeros(16)))
        16.0
    """

    def __init__(self, weight: Callable[[Any], float] | None = None, where: str = "batches()") -> None:
        if weight is not None and not callable(weight):
            raise TypeError(f"`weight` must be a callable: weight(batch) -> number. Received: weight={weight!r}.")
        self._weight, self.given, self._where = weight, weight is not None, where
        self._rows_in_front = False  # a batch has shown that its tensors have their rows in front
        self._shapes: list[Any] | None = None  # of the last batch that was flat
        self._count = 0.0  # its rows

    def __call__(self, batch: Any) -> float:
        if self._weight is not None:
            return checked_weight(self._weight(batch))
        try:
            shapes = [*map(_SHAPE, batch)] if type(batch) is tuple or type(batch) is list else []
        except AttributeError:
            shapes = []
        if shapes == self._shapes:
            return self._count  # nearly always
        firsts = {s[0] if s and type(leaf) is Tensor else None for s, leaf in zip(shapes, batch if shapes else ())}
        rows = firsts.pop() if len(firsts) == 1 else None
        if rows is None or (rows in _CHANNELS and not self._rows_in_front):
            rows = self._rows(batch)
        self._rows_in_front = self._rows_in_front or rows not in _CHANNELS
        self._shapes, self._count = shapes or None, float(rows)
        return float(rows)

    def _rows(self, batch: Any) -> int:
        if (listed := _listed_rows(batch)) is not None:
            return listed
        try:
            found = set(_rows_of_leaves(batch))
            rows = found.pop() if len(found) == 1 else number_of_rows(batch)  # whose error lists what there is
            if rows in _CHANNELS and not self._rows_in_front:
                _check_channels(batch)
        except ValueError as error:
            raise ValueError(
                f"{error}\nPass weight= to {self._where}: weight(batch) -> the number of its rows."
            ) from None
        return rows


def _rows_of_leaves(batch: Any) -> Iterator[int]:
    for _, leaf in leaves(batch):
        if isinstance(leaf, PackedSequence):
            yield int(leaf.batch_sizes[0])
        elif has_rows(leaf):
            yield int(leaf.shape[0])


def _listed_rows(batch: Any) -> int | None:
    """How many rows a list of rows has, as `collate_fn=lambda rows: rows` or `tuple(zip(*rows))` makes it.

    Each row then has a number of its own, such as its label.
    """
    if type(batch) not in (list, tuple) or not batch:
        return None
    if all(type(item) in (list, tuple, dict) for item in batch):
        items = [[*item.values()] if isinstance(item, dict) else item for item in batch]
        if all(any(map(_is_number, item)) for item in items) and not any(all(map(_is_number, item)) for item in items):
            return len(batch)
        if len({*map(len, items)}) == 1 and any(item and all(map(_is_number, item)) for item in items):
            return len(items[0])
    return None


def _is_number(item: Any) -> bool:
    return isinstance(item, (bool, int, float)) or (isinstance(item, Tensor) and item.dim() == 0)


def _check_channels(node: Any) -> None:
    """Raise if the tensors of a list look like images of different size: their first dimension is the channels."""
    items = [child for _, _, child in children(node) or ()]
    images = all(isinstance(item, Tensor) and item.dim() == 3 and item.is_floating_point() for item in items)
    shapes = {item.shape[1:] for item in items} if images else set()
    if isinstance(node, (list, tuple)) and images and len(shapes) > 1:
        raise ValueError(
            f"A list of {len(items)} tensors of shapes {[tuple(item.shape) for item in items]} may be images of "
            "different sizes, whose first dimension is channels, not rows."
        )
    if isinstance(node, (list, tuple)) and images and len(items) > 2:
        raise ValueError(
            f"A list of {len(items)} tensors of shape {tuple(items[0].shape)} may be as many images, whose first "
            "dimension is channels, not rows."
        )
    for item in items:
        _check_channels(item)
