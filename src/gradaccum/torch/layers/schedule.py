"""The order of passes: micro-batch by micro-batch forward, block by block backward."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.core.sizes import Piece, Rows, Tokens
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.fitting import StartOver, nothing_fits
from gradaccum.on_torch.memory import Gauge, is_out_of_memory
from gradaccum.on_torch.random_state import all_generators, kept
from gradaccum.torch.buffers import Attributes
from gradaccum.torch.chunking.recompute import accelerators, parametrizations_computed
from gradaccum.torch.distributed import ByBlocks
from gradaccum.torch.layers.backward_optimizer import BlockListener, Window
from gradaccum.torch.layers.blocks import Blocks, find_blocks
from gradaccum.torch.layers.calls import MicroBatch
from gradaccum.torch.layers.first_passes import FirstPasses
from gradaccum.torch.layers.interception import intercepted
from gradaccum.torch.layers.offload import OffloadChoice, Store
from gradaccum.torch.layers.offloaded_blocks import OffloadedBlocks

__all__ = ["Layers"]

logger = logging.getLogger("gradaccum")


class Layers:
    """The blocks of a model, whose backward passes go block by block, each over all micro-batches.

    Forward, a micro-batch's blocks run without graphs, all but the last: what is kept is what they are called with. Its
    loss goes backward at once, down to what the last block was called with. When all micro-batches have come so far,
    the block before it runs again on each of them and passes their gradients on; then the one before that, and so on.
    What stands before the blocks runs again at last.

    The last block runs again, too, where it is on the device only while it computes.

    Args:
        model: The model.
        blocks: Its blocks, and where they live.
        offload: Where activations between blocks wait.
    """

    def __init__(self, model: nn.Module, blocks: Blocks, offload: OffloadChoice = False) -> None:
        self.model, self.blocks = model, find_blocks(model, blocks.modules)
        self.update = blocks.update
        self.offloaded = None if blocks.on is None else OffloadedBlocks(model, self.blocks)
        self._first = FirstPasses(model, self.blocks, Store(offload), self.offloaded)
        self.ranks, self.waits = ByBlocks(), False  # of a sharded model, and whether they wait for each other
        self.listener: BlockListener | None = None
        """Updates parameters while backward goes on."""
        self.failed = dict[str, Exception]()
        """How running a block again failed while something was proven, by path."""
        self._at_once = self._proving = False
        self._largest: Any = None
        self._micro_batches: list[MicroBatch] = []
        self._attributes: tuple[int, Attributes] | None = None

    def run(
        self,
        plan: Rows | Tokens,
        forward_and_loss: Callable[[Piece], None],
        gauge: Gauge,
        window: Window,
        *,
        proving: bool,
    ) -> None:
        """All passes of a window.

        Args:
            plan: Its micro-batches.
            forward_and_loss: Runs the forward pass of one, and its loss' backward pass down to the last block.
            gauge: What memory there is.
            window: What adds up the losses.
            proving: Whether rows are taken again before second passes, and what blocks keep is noted.

        Raises:
            StartOver: Smaller micro-batches may fit.
            torch.OutOfMemoryError: None does.
            ValueError: Blocks are not called once each in order.
        """
        self.clear()
        self._proving, listener, first = proving, self.listener, self._first
        if listener is not None:
            listener.open()
        tail = len(self.blocks) - (self.offloaded is None)
        first.open(tail, proving=proving, notes_leaves=listener is not None, around=self.ranks.call)
        with self.ranks.window(), intercepted([block.module for block in self.blocks], first.call):
            try:
                with self.ranks.forward(frees=listener is not None, tail=first.tail):
                    for piece in plan:
                        self._at_once = plan.measuring  # so that what it costs is all of it
                        forward_and_loss(piece)
                if not self.waits:  # others would wait for one that starts over
                    first.learn()
                if listener is not None:
                    listener.begin(window, {**first.reached, **self.ranks.places()}, rehearsal=proving)
                self._fitting(plan, gauge)
            except BaseException as error:
                if listener is None or (told := listener.explained(error)) is error:
                    raise
                raise told from error
            finally:
                self.clear()

    def clear(self) -> None:
        """Forget what first passes have kept."""
        self._micro_batches, self._largest, self._attributes = [], None, None
        self._first.open(len(self.blocks), proving=False, notes_leaves=False)
        if self.offloaded is not None:
            self.offloaded.forget()

    @property
    def left(self) -> dict[str, list[str]]:
        """What blocks have kept in attributes while something was proven, by path."""
        return self._first.left

    # The blocks' parameters.

    @property
    def proves(self) -> bool:
        """Whether some rows can go through the whole model at once, as a proof needs."""
        return self.offloaded is None or self.offloaded.proves

    def reachable(self) -> contextlib.AbstractContextManager[None]:
        """Around an update: blocks that live elsewhere can be called meanwhile, in passes of any kind."""
        return contextlib.nullcontext() if self.offloaded is None else self.offloaded.reachable()

    def _on_device(self, place: int) -> contextlib.AbstractContextManager[None]:
        if self.offloaded is None:
            return contextlib.nullcontext()
        return self.offloaded.on_device(place, following=place - 1)

    # Forward.

    def micro_batch(
        self, retake: Callable[[], Batch], forward: Callable[[Batch], Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Around a micro-batch's forward pass, as for `FirstPasses.micro_batch`."""
        return self._first.micro_batch(retake, forward)

    def shares(self, loss: Tensor) -> bool:
        """As `MicroBatch.shares`, of the one that has come forward."""
        return self._first.shares(loss)

    def commit(self, piece: Any) -> None:
        """The micro-batch's loss has gone backward, so its blocks' gradients are due.

        Args:
            piece: What it was cut out as.
        """
        current = self._first.finish()
        self.ranks.add_up(len(self.blocks) - 1 if self._first.tail < len(self.blocks) else -1)
        if not (any(current.calls) or current.first_grads):
            return
        self._micro_batches.append(current)
        if self._largest is None or piece.size > self._largest.size:
            self._largest = piece
        if self._at_once:
            self.backward()

    # Backward.

    def backward(self, finished: Callable[[int], None] | None = None) -> None:
        """Block by block, each over all micro-batches; then what stands before the blocks.

        Args:
            finished: Called with the place of each block whose gradients are complete, and with -1 at the end.
        """
        self._first.drop()
        waiting, self._micro_batches = self._micro_batches, []
        drawn = {g for micro_batch in waiting for g in micro_batch.drawn}  # and to be put back
        devices = accelerators(p for state in self._first.states.values() for p in state.parameters)
        with kept(drawn.union(all_generators(devices))):
            for place in reversed(range(len(self.blocks))):
                with self.ranks.backward(place, used=finished is not None):
                    if any(micro_batch.calls[place] is not None for micro_batch in waiting):
                        with self._first.states[place].restored(), parametrizations_computed(), self._on_device(place):
                            for index, micro_batch in enumerate(waiting):
                                following = waiting[index + 1 :][:1] or (waiting[:1] if place else [])
                                for other in following:
                                    other.prefetch(place if other is not waiting[0] else place - 1)
                                self._again(place, micro_batch)
                if finished is not None:
                    finished(place)
            with self.ranks.backward(-1, used=finished is not None):
                for micro_batch in waiting:
                    self._before_the_blocks(micro_batch)
        if finished is not None:
            finished(-1)

    def _fitting(self, plan: Rows | Tokens, gauge: Gauge) -> None:
        """The same, where a micro-batch may not fit: blocks keep no activations before they run again.

        Args:
            plan: Where smaller micro-batches come from.
            gauge: What they cost.

        Raises:
            StartOver: One did not fit; smaller ones may.
            torch.OutOfMemoryError: As few rows as can be don't fit.
        """
        piece = self._largest
        try:
            self.backward(None if self.listener is None else self.listener.finished)
            return
        except Exception as error:
            begun = self.listener is not None and self.listener.made is not None
            if piece is None or begun or self.waits or not is_out_of_memory(error):
                raise  # where other ranks wait, they are told
            alone = plan.indivisible(piece)
            if alone is not None:
                raise nothing_fits(error, alone) from error
        self.clear()
        gauge.release()  # only here, out of reach of the error's frames, is its memory free
        logger.warning(
            "Out of memory in a block's backward pass with %d rows: all over again in micro-batches of %d.",
            piece.size,
            plan.failed(piece)[0].size,
        )
        raise StartOver

    def _again(self, place: int, micro_batch: MicroBatch) -> None:
        call = micro_batch.calls[place]
        if call is None:
            return
        micro_batch.calls[place] = None
        if self._attributes is None or self._attributes[0] != place:  # what first passes have set counts
            self._attributes = place, Attributes(call.block.module.modules())
        try:
            if self._proving:
                micro_batch.retake()
            found = call.again()
        except Exception as error:
            self.failed[call.block.path] = error
            getattr(error, "add_note", str)(f"Raised where backward runs the block {call.block.path!r} again.")
            raise
        finally:
            self._attributes[1].put_back()
        micro_batch.arrive(place, call, found)
        self.ranks.add_up(place)

    def _before_the_blocks(self, micro_batch: MicroBatch) -> None:
        """The gradients of what the first block is called with, passed on to what stands before it."""
        if not micro_batch.first_grads:
            return
        batch = micro_batch.retake()
        around, inside = self._first.sides
        attributes = Attributes(around, hooked=inside)
        self._first.reaching = True
        try:
            roots, grads = micro_batch.reach(batch, self.blocks[0].path)
        finally:
            self._first.reaching = False
            # The exception has left out what the user's code does after its forward pass, such as removing hooks.
            attributes.put_back()
        if roots:
            torch.autograd.backward(roots, grads)
            self.ranks.add_up()
