"""First passes: micro-batch by micro-batch, each through all blocks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.on_torch.batch import Batch, leaves
from gradaccum.on_torch.fitting import StartOver
from gradaccum.on_torch.held import held_generators
from gradaccum.on_torch.private import leaves_of
from gradaccum.on_torch.random_state import all_generators
from gradaccum.torch.chunking.recompute import Conditions, ModuleState, accelerators
from gradaccum.torch.chunking.trees import Inputs, tensors_of
from gradaccum.torch.chunking.watch import attributes_of
from gradaccum.torch.layers.blocks import Block
from gradaccum.torch.layers.calls import BlockCall, MicroBatch, Reached
from gradaccum.torch.layers.interception import called
from gradaccum.torch.layers.offload import Store
from gradaccum.torch.layers.offloaded_blocks import OffloadedBlocks
from gradaccum.torch.layers.written import MovedBuffers

__all__ = ["FirstPasses"]

logger = logging.getLogger("gradaccum")

_LONG = ("python", "numpy")

Around = Callable[[int], contextlib.AbstractContextManager[Any]]


class FirstPasses:
    """The passes that tell the loss, and what they leave for those in which blocks run again.

    Blocks run without graphs: what is kept is what they are called with. The tail, which begins with the last block,
    runs once: with its graph, of which the loss' backward pass leaves the gradients of what that block is called with.

    Args:
        model: The model.
        blocks: Its blocks.
        store: Where activations between blocks wait.
        offloaded: Brings blocks that live in host memory, or None.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[Block], store: Store, offloaded: OffloadedBlocks | None
    ) -> None:
        self._model, self._blocks, self._store, self._offloaded = model, blocks, store, offloaded
        self.left = dict[str, list[str]]()
        """What blocks have kept in attributes while something was proven, by path."""
        self._drawn, self._learned = set[Any](), False
        self.open(len(blocks), proving=False, notes_leaves=False)

    def open(self, tail: int, *, proving: bool, notes_leaves: bool, around: Around = contextlib.nullcontext) -> None:
        """A window begins.

        Args:
            tail: The place of the block that the tail begins with; their number, where all of them run again.
            proving: Whether what blocks keep in attributes is noted.
            notes_leaves: Whether it is noted whose gradients come from graphs between blocks.
            around: Called with a block's place. Returns a context around each of its calls.
        """
        self._around = around
        self.tail, self._proving, self._notes_leaves = tail, proving, notes_leaves
        self.reached = dict[int, int]()
        """Of what graphs between blocks lead to, by id, after which block's turn its gradient is in."""
        self.reaching = False
        """Whether what stands before the blocks runs again."""
        self.states = dict[int, ModuleState]()
        """Of blocks that run again, by place."""
        self._buffers = dict[int, MovedBuffers]()
        self._generators: list[Any] | None = None
        self._sides: tuple[list[nn.Module], list[nn.Module]] | None = None
        self.drop()

    def learn(self) -> None:
        """A window's have run. Blocks look from here on at those long states that were drawn from.

        Python's and NumPy's, that is; each micro-batch still looks at all of them.
        """
        self._learned = True

    def drop(self) -> None:
        """The micro-batch that has come last is none."""
        self._current: MicroBatch | None = None

    @property
    def sides(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """The modules around the blocks, and those inside of them, as they were when the window began."""
        if self._sides is None:
            inside = [module for block in self._blocks for module in block.module.modules()]
            known = set(map(id, inside))
            self._sides = [module for module in self._model.modules() if id(module) not in known], inside
        return self._sides

    @contextlib.contextmanager
    def micro_batch(self, retake: Callable[[], Batch], forward: Callable[[Batch], Any]) -> Iterator[None]:
        """Around a micro-batch's forward pass.

        Args:
            retake: Returns the micro-batch once more.
            forward: Computes its loss, as the forward pass does.

        Raises:
            ValueError: The blocks are not called once each in order; the message names the first that isn't.
            StartOver: Random numbers were drawn from where none were before.
        """
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        if self._offloaded is not None:
            device = self._offloaded.device
            self._offloaded.prefetch(0)
        if -1 not in self._buffers:
            outside = [
                (module._buffers, name, buffer)
                for module in self.sides[0]
                for name, buffer in module._buffers.items()
                if buffer is not None
            ]
            self._buffers[-1] = MovedBuffers(outside)
        if self._generators is None:  # the user's own
            self._generators = held_generators(self._model, forward)
        generators = [*all_generators([device]), *self._generators]
        conditions = Conditions(generators, accelerators([torch.empty(0, device=device)]))
        copies = self._buffers[-1].copies()
        self._current = current = MicroBatch(retake, forward)
        try:
            yield
        except BaseException:
            self._current = None
            raise
        if current.calls:
            current.check_turn(len(self._blocks), self._blocks)
        conditions.advance()
        drawn = {generator for generator in conditions.random.states if generator in _LONG}
        unseen = drawn - self._drawn if self._learned else set()
        self._drawn |= drawn
        if unseen:  # by a block, maybe, that has not looked at what it drew from
            conditions.random.only(unseen).put_back()
            logger.info(
                "Drawn from %s for the first time in a forward pass: all over again.", ", ".join(sorted(unseen))
            )
            raise StartOver
        current.close(conditions, self._buffers[-1].moved(copies))

    def shares(self, loss: Tensor) -> bool:
        """As `MicroBatch.shares`, of the one that has come forward."""
        return self._current is not None and self._current.shares(loss)

    def finish(self) -> MicroBatch:
        """The micro-batch's loss has gone backward. Returns what it has left."""
        current, self._current = self._current, None
        assert current is not None
        current.finish_tail(self.tail)
        return current

    def call(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block is called. Returns its outputs.

        Raises:
            ValueError: It wasn't its turn.
        """
        inputs = Inputs(args, kwargs)
        if self.reaching:
            raise Reached(place, inputs)
        block, current = self._blocks[place], self._current
        if current is not None and current.done and place >= self.tail:  # by a checkpoint around it
            return called(block.module, args, kwargs)
        if current is None or current.done:
            raise ValueError(
                f"The block {block.path!r} was called in a backward pass. Is it called inside of "
                "torch.utils.checkpoint? Leave that out: with `blocks`, each block is recomputed in any case."
            )
        current.check_turn(place, self._blocks)
        if not torch.is_grad_enabled():
            current.calls.append(None)
            with self._around(place), self._on_device(place):
                return called(block.module, args, kwargs)
        before = attributes_of(block.module) if self._proving else {}
        with self._around(place):
            outputs = (self._in_tail if place >= self.tail else self._without_graph)(place, inputs, current)
        if self._proving:
            now = attributes_of(block.module)
            left = [name for name, value in now.items() if value is not before.get(name)]
            if left:
                self.left[block.path] = left
        return outputs

    def _in_tail(self, place: int, inputs: Inputs, current: MicroBatch) -> Any:
        call = BlockCall(self._blocks[place], inputs.args, inputs.kwargs)
        self._note(place, call, current)
        return call.run_with_graph()

    def _without_graph(self, place: int, inputs: Inputs, current: MicroBatch) -> Any:
        block, state = self._blocks[place], self._state(place)
        devices = accelerators([*tensors_of(inputs), *state.parameters])
        given = held_generators(*(leaf for _, leaf in leaves(inputs)), *(self._generators or ()))
        watched = [g for g in all_generators(devices) if not self._learned or g in self._drawn or g not in _LONG]
        generators = [*watched, *state.generators, *given]
        call = BlockCall(block, inputs.args, inputs.kwargs)
        differentiated = bool(call.roots) or any(parameter.requires_grad for parameter in state.parameters)
        self._note(place, call, current, differentiated=differentiated)
        with self._on_device(place):
            return call.run(
                current.objects,
                generators,
                devices,
                self._buffers[place],
                self._store,
                differentiated=differentiated,
            )

    def _on_device(self, place: int) -> contextlib.AbstractContextManager[None]:
        """Around a block that is here, or comes."""
        if self._offloaded is None:
            return contextlib.nullcontext()
        return self._offloaded.on_device(place, following=place + 1)

    def _note(self, place: int, call: BlockCall, current: MicroBatch, *, differentiated: bool = True) -> None:
        current.calls.append(call if differentiated else None)
        if self._notes_leaves:
            for leaf in {leaf for root in call.roots.values() for leaf in leaves_of(root)}:
                self.reached[leaf] = min(place or -1, self.reached.get(leaf, place))
        current.note_roots(place, call)

    def _state(self, place: int) -> ModuleState:
        if place not in self.states:
            state = ModuleState(self._blocks[place].module)
            self.states[place] = state
            self._buffers[place] = MovedBuffers(state.buffers)
        return self.states[place]
