"""Layer by layer: micro-batch by micro-batch forward, block by block backward, each block over all micro-batches."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.core.sizes import Plan, Slice
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.memory import MemoryMeter, is_out_of_memory
from gradaccum.on_torch.oom_retry import RestartWindow, nothing_fits
from gradaccum.on_torch.random_state import all_generators, kept
from gradaccum.torch.buffers import Attributes
from gradaccum.torch.chunking.recompute import accelerators, parametrizations_computed
from gradaccum.torch.distributed import ByBlocks
from gradaccum.torch.layers.backward_optimizer import BlockListener, Window
from gradaccum.torch.layers.blocks import Blocks, find_blocks
from gradaccum.torch.layers.forward import Drawn, ForwardPasses, MicroBatch
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
    """

    def __init__(self, model: nn.Module, blocks: Blocks, offload: OffloadChoice = False) -> None:
        self.model, self.blocks = model, find_blocks(model, blocks.modules)
        self.update = blocks.update
        self.offloaded = None if blocks.on is None else OffloadedBlocks(model, self.blocks)
        self.ranks, self.waits = ByBlocks(), False  # of a sharded model, and whether they wait for each other
        self.listener: BlockListener | None = None
        """Updates parameters while backward goes on."""
        self.failed = dict[str, Exception]()
        """How running a block again failed while something was proven, by path."""
        self.left = dict[str, list[str]]()
        """What blocks have kept in attributes while something was proven, by path."""
        self._store, self._drawn = Store(offload), Drawn()
        self._forward: ForwardPasses | None = None
        self._at_once = self._proving = False
        self.clear()

    def run(
        self,
        plan: Plan,
        forward_and_loss: Callable[[Slice], None],
        gauge: MemoryMeter,
        window: Window,
        *,
        proving: bool,
    ) -> None:
        """All passes of a window."""
        self.clear()
        self._proving, listener, ranks = proving, self.listener, self.ranks
        if listener is not None:
            listener.open()
        forward = self._forward = self._forward_passes(proving)
        with ranks.window(), intercepted([block.module for block in self.blocks], forward.call):
            try:
                with ranks.forward(frees=listener is not None, tail=forward.tail):
                    for piece in plan:
                        self._at_once = plan.measuring  # so that what it costs is all of it
                        forward_and_loss(piece)
                if not self.waits:  # others would wait for one that starts over
                    self._drawn.learn()
                if listener is not None:
                    listener.begin(window, {**forward.reached, **ranks.places()}, rehearsal=proving)
                self._backward_that_fits(plan, gauge)
            except BaseException as error:
                explained = error if listener is None else listener.explained(error)
                if explained is error:
                    raise
                raise explained from error
            finally:
                self.left.update(forward.left)
                self.clear()

    def _forward_passes(self, proving: bool = False) -> ForwardPasses:
        return ForwardPasses(
            self.model,
            self.blocks,
            self._store,
            self.offloaded,
            self._drawn,
            tail=len(self.blocks) - (self.offloaded is None),
            around=self.ranks.call,
            proving=proving,
            notes_leaves=self.listener is not None,
        )

    def clear(self) -> None:
        """Forget what forward passes have kept."""
        self._forward = None
        self._micro_batches: list[MicroBatch] = []
        self._largest: Any = None
        if self.offloaded is not None:
            self.offloaded.forget()

    @property
    def proves(self) -> bool:
        """Whether some rows can go through the whole model at once, as a proof needs."""
        return self.offloaded is None or self.offloaded.proves

    def reachable(self) -> contextlib.AbstractContextManager[None]:
        """Around an update: blocks that live elsewhere can be called meanwhile, in passes of any kind."""
        return contextlib.nullcontext() if self.offloaded is None else self.offloaded.reachable()

    # Forward.

    def micro_batch(
        self, retake: Callable[[], Batch], forward: Callable[[Batch], Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Around a micro-batch's forward pass, as for `ForwardPasses.micro_batch`."""
        assert self._forward is not None
        return self._forward.micro_batch(retake, forward)

    def shares(self, loss: Tensor) -> bool:
        """As `MicroBatch.shares`, of the one that has come forward."""
        current = None if self._forward is None else self._forward.current
        return current is not None and current.shares(loss)

    def commit(self, piece: Any) -> None:
        """The loss of this micro-batch has gone backward, so its blocks' gradients are due."""
        forward = self._forward
        assert forward is not None
        current = forward.finish()
        self.ranks.add_up(len(self.blocks) - 1 if forward.tail < len(self.blocks) else -1)
        if not (any(current.calls) or current.first_grads):
            return
        self._micro_batches.append(current)
        if self._largest is None or piece.size > self._largest.size:
            self._largest = piece
        if self._at_once:
            self.backward()

    # Backward.

    def _backward_that_fits(self, plan: Plan, gauge: MemoryMeter) -> None:
        """Backward; where a block runs out of memory, the window starts over in smaller micro-batches."""
        piece = self._largest
        try:
            self.backward(None if self.listener is None else self.listener.finished)
            return
        except Exception as error:
            begun = self.listener is not None and self.listener.made is not None
            if piece is None or begun or self.waits or not is_out_of_memory(error):
                raise  # where other ranks wait, they learn of it
            alone = plan.indivisible(piece)
            smaller = plan.too_large(piece.tokens) if alone is None else None
            if smaller is None:
                raise nothing_fits(error, alone or f"{piece.size} rows") from error
        self.clear()
        gauge.release()  # only here, out of reach of the error's frames, is its memory free
        logger.warning(
            "Out of memory in a block's backward pass with %d rows: all over again in smaller micro-batches.",
            piece.size,
        )
        raise RestartWindow(smaller)

    def backward(self, finished: Callable[[int], None] | None = None) -> None:
        """Block by block, each over all micro-batches; then what stands before the blocks (-1)."""
        forward = self._forward
        assert forward is not None
        forward.current = None
        waiting, self._micro_batches = self._micro_batches, []
        drawn = {g for micro_batch in waiting for g in micro_batch.drawn}  # and to be put back
        devices = accelerators(p for state in forward.states.values() for p in state.parameters)
        with kept(drawn.union(all_generators(devices))):
            for place in reversed(range(len(self.blocks))):
                with self.ranks.backward(place, used=finished is not None):
                    self._turn(place, [m for m in waiting if m.calls[place] is not None], forward)
                if finished is not None:
                    finished(place)
            with self.ranks.backward(-1, used=finished is not None):
                for micro_batch in waiting:
                    self._before_the_blocks(micro_batch, forward)
        if finished is not None:
            finished(-1)

    def _turn(self, place: int, waiting: list[MicroBatch], forward: ForwardPasses) -> None:
        """A block runs again on each of these micro-batches, and backward."""
        if not waiting:
            return
        on_device: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.offloaded is not None:
            on_device = self.offloaded.on_device(place, following=place - 1)
        with forward.states[place].restored(), parametrizations_computed(), on_device:
            attributes = Attributes(self.blocks[place].module.modules())  # what first passes have set counts
            for index, micro_batch in enumerate(waiting):
                if index + 1 < len(waiting):
                    waiting[index + 1].prefetch(place)
                else:
                    waiting[0].prefetch(place - 1)
                self._again(place, micro_batch, attributes)
                self.ranks.add_up(place)

    def _again(self, place: int, micro_batch: MicroBatch, attributes: Attributes) -> None:
        call, micro_batch.calls[place] = micro_batch.calls[place], None
        assert call is not None
        try:
            if self._proving:
                micro_batch.retake()
            found = call.again()
        except Exception as error:
            self.failed[call.block.path] = error
            getattr(error, "add_note", str)(f"Raised where backward runs the block {call.block.path!r} again.")
            raise
        finally:
            attributes.put_back()
        micro_batch.arrive(place, call, found)

    def _before_the_blocks(self, micro_batch: MicroBatch, forward: ForwardPasses) -> None:
        """The gradients of what the first block is called with, passed on to what stands before it."""
        if not micro_batch.first_grads:
            return
        batch = micro_batch.retake()
        around, inside = forward.sides
        attributes = Attributes(around, hooked=inside)
        forward.reaching = True
        try:
            roots, grads = micro_batch.reach(batch, self.blocks[0].path)
        finally:
            forward.reaching = False
            # The exception has left out what the user's code does after its forward pass, such as removing hooks.
            attributes.put_back()
        if roots:
            torch.autograd.backward(roots, grads)
            self.ranks.add_up()
