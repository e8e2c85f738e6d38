"""Forward passes layer by layer: micro-batch by micro-batch, each through all blocks, whose inputs are kept.

Blocks run without graphs. The tail, which begins with the last block, runs once: with its graph, of which the loss'
backward pass leaves the gradients of what that block is called with.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradaccum.on_torch.batch import Batch, leaves
from gradaccum.on_torch.held import held_generators
from gradaccum.on_torch.oom_retry import RestartWindow
from gradaccum.on_torch.private import graph_of, leaves_of
from gradaccum.on_torch.random_state import all_generators
from gradaccum.torch.chunking.recompute import Conditions, ModuleContents, accelerators
from gradaccum.torch.chunking.trees import Inputs, tensors_of
from gradaccum.torch.chunking.watch import attributes_of
from gradaccum.torch.layers.arguments import Arguments, GivenTensors
from gradaccum.torch.layers.blocks import Block
from gradaccum.torch.layers.calls import BlockCall, MovedBuffers, buffers_as_found
from gradaccum.torch.layers.interception import called
from gradaccum.torch.layers.offload import Store
from gradaccum.torch.layers.offloaded_blocks import OffloadedBlocks

__all__ = ["Drawn", "ForwardPasses", "MicroBatch"]

logger = logging.getLogger("gradaccum")

_LONG = ("python", "numpy")  # generators whose states take long to look at

_ORDER = (
    "`blocks` must be called once each, in their order, in the forward pass of every micro-batch. {what} Leave out of "
    "`blocks` what is called otherwise, or list the modules in the order in which they are called."
)


class Reached(BaseException):  # no error, and nothing that a loss would catch
    """The model has come to a block, which is far enough."""

    def __init__(self, place: int, inputs: Inputs) -> None:
        super().__init__()
        self.place, self.inputs = place, inputs


class MicroBatch:
    """What a micro-batch's forward pass leaves for backward."""

    def __init__(self, retake: Callable[[], Batch], forward: Callable[[Batch], Any]) -> None:
        self.retake, self._forward = retake, forward
        self.given: GivenTensors = {}
        self.calls: list[BlockCall | None] = []
        self.done = False
        self._conditions: Conditions | None = None
        self._buffers: list[Any] = []
        self.first_grads: dict[int, Tensor] = {}
        """Of what the first block is called with, by place."""
        self._keys: Any = WeakIdKeyDictionary()
        self._numbers = itertools.count()
        self._first_places: dict[int, int] = {}
        self._due: dict[int, dict[int, Any]] = {}
        self._grads: dict[int, Tensor] = {}

    def check_turn(self, place: int, blocks: Sequence[Block]) -> None:
        """Raise a ValueError, which names a block, if this place isn't the next; that after the last is the end."""
        count = len(self.calls)
        if place == count:
            return
        if place == len(blocks):
            what = f"The block {blocks[count].path!r} was not called."
        elif place < count:
            what = f"The block {blocks[place].path!r} was called twice."
        else:
            what = f"The block {blocks[count].path!r} was not called before {blocks[place].path!r}."
        raise ValueError(_ORDER.format(what=what))

    def note_roots(self, place: int, call: BlockCall) -> None:
        """A block has been called: note what passes gradients on, and what no block before it was called with.

        What the first block is called with isn't held, nor is so the graph of what stands before it.
        """
        for index, root in call.roots.items():
            key = self._keys.get(root)
            if key is None:
                self._keys[root] = key = next(self._numbers)
                if place == 0:
                    self._first_places[key] = index
                else:
                    # The edge holds the graph alone, so that the tensor can wait elsewhere.
                    edge = root if root.is_leaf else torch.autograd.graph.get_gradient_edge(root)
                    self._due.setdefault(place, {})[key] = edge
            call.keys[index] = key
        call.roots = {}

    def close(self, conditions: Conditions, buffers: list[Any]) -> None:
        """Its forward pass is over: it began with these conditions, and has moved these buffers around the blocks."""
        self._conditions, self._buffers, self.done = conditions, buffers, True
        self.given = {}  # which would hold what the blocks have written to

    def shares(self, loss: Tensor) -> bool:
        """Whether its loss goes backward through what gradients of blocks have to go through later: between blocks.

        Elsewhere a graph is not to be retained, which takes memory, and which modules that are compiled refuse.
        """
        edges = [edge for due in self._due.values() for edge in due.values() if not isinstance(edge, Tensor)]
        later = [edge.node for edge in edges if not _ends(edge.node)]
        return bool(later) and not all(map(_ends, {*graph_of(*later)}.intersection(graph_of(loss.grad_fn))))

    @property
    def drawn(self) -> set[Any]:
        """The generators that its forward pass has drawn from."""
        own = set() if self._conditions is None else set(self._conditions.random.states)
        return own.union(*(call.drawn for call in self.calls if call is not None))

    def finish_tail(self, place: int) -> None:
        """Its loss has gone backward: so has the call of the block at this place, which kept its graph."""
        call = self.calls[place] if place < len(self.calls) else None
        if call is not None:
            self.calls[place] = None
            self.arrive(place, call, call.arrived())

    def prefetch(self, place: int) -> None:
        """A block's call will run again soon."""
        call = self.calls[place] if place < len(self.calls) else None
        if call is not None:
            call.prefetch()

    def arrive(self, place: int, call: BlockCall, found: dict[int, Tensor]) -> None:
        """The inputs of the block at this place have gradients: pass on those that no block before it waits for."""
        for index, grad in found.items():
            key = call.keys[index]
            self._grads[key] = self._grads[key] + grad if key in self._grads else grad
        if place == 0:
            grads = self._grads
            self.first_grads = {index: grads.pop(key) for key, index in self._first_places.items() if key in grads}
            return
        roots = [(root, self._grads.pop(key)) for key, root in self._due.pop(place, {}).items() if key in self._grads]
        if roots:  # two of them may come from the same tensors, at different times
            torch.autograd.backward([root for root, _ in roots], [grad for _, grad in roots], retain_graph=True)

    def reach(self, batch: Batch, first: str) -> tuple[list[Tensor], list[Tensor]]:
        """What stands before the blocks runs again. Returns what the first block is called with, and its gradients."""
        assert self._conditions is not None
        grads = self.first_grads
        with torch.enable_grad(), buffers_as_found(self._buffers), self._conditions.restored():
            try:
                self._forward(batch)
            except Reached as reached:
                reached.__traceback__ = None
                place, inputs = reached.place, reached.inputs
            else:
                raise AssertionError("the first pass came to a block")
        tensors = Arguments(inputs, {}).tensors
        if place != 0 or len(tensors) <= max(grads) or any(tensors[i].shape != g.shape for i, g in grads.items()):
            raise ValueError(
                f"What the block {first!r} is called with was something else when backward ran the model "
                "up to there again. Does the loss take something from an iterator, or count its calls?"
            )
        found = [(tensors[index], grad) for index, grad in grads.items() if tensors[index].requires_grad]
        return [root for root, _ in found], [grad for _, grad in found]


def _ends(node: Any) -> bool:
    """Whether a graph ends here, with nothing that a backward pass frees."""
    return hasattr(node, "variable") or isinstance(getattr(node, "call", None), BlockCall)


class Drawn:
    """Which of the generators with long states a model draws from: learned in the first window."""

    def __init__(self) -> None:
        self._known, self._learned = set[Any](), False

    def learn(self) -> None:
        """A window's forward passes have run. Blocks look from here on at those that were drawn from."""
        self._learned = True

    def is_watched(self, generator: Any) -> bool:
        """Whether a block looks at this one."""
        return not self._learned or generator in self._known or generator not in _LONG

    def note(self, conditions: Conditions) -> None:
        """A micro-batch, which looks at all generators, has drawn from those of these conditions."""
        drawn = {generator for generator in conditions.random.states if generator in _LONG}
        unseen = drawn - self._known if self._learned else set()
        self._known |= drawn
        if unseen:
            conditions.random.only(unseen).put_back()
            logger.info(
                "Drawn from %s for the first time in a forward pass: all over again.", ", ".join(sorted(unseen))
            )
            raise RestartWindow


class ForwardPasses:
    """One window's passes forward, and what they leave for those in which blocks run again.

    `tail` is the place of the block that the tail begins with: their number, where all of them run again. `around`
    returns a context around each call of the block at a place. `notes_leaves`: whose gradients come from graphs between
    blocks is noted.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        store: Store,
        offloaded: OffloadedBlocks | None,
        drawn: Drawn,
        *,
        tail: int,
        around: Callable[[int], contextlib.AbstractContextManager[Any]],
        proving: bool = False,
        notes_leaves: bool = False,
    ) -> None:
        self._model, self._blocks, self._store, self._offloaded = model, blocks, store, offloaded
        self._learned, self.tail, self._around = drawn, tail, around
        self._proving, self._notes_leaves = proving, notes_leaves
        self.left = dict[str, list[str]]()
        """What blocks have kept in attributes while something was proven, by path."""
        self.reached = dict[int, int]()
        """Of what graphs between blocks lead to, by id, after which block's turn its gradient is in."""
        self.reaching = False
        """Whether what stands before the blocks runs again."""
        self.states = dict[int, ModuleContents]()
        """Of blocks that run again, by place."""
        inside = [module for block in blocks for module in block.module.modules()]
        known = set(map(id, inside))
        self.sides = [module for module in model.modules() if id(module) not in known], inside
        """The modules around the blocks, and those inside of them, as they were when the window began."""
        self._outside = MovedBuffers(
            [
                (module._buffers, name, buffer)
                for module in self.sides[0]
                for name, buffer in module._buffers.items()
                if buffer is not None
            ]
        )
        self._buffers = dict[int, MovedBuffers]()
        self._generators: list[Any] | None = None
        self.current: MicroBatch | None = None

    @contextlib.contextmanager
    def micro_batch(self, retake: Callable[[], Batch], forward: Callable[[Batch], Any]) -> Iterator[None]:
        """Around a micro-batch's forward pass."""
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        if self._offloaded is not None:
            device = self._offloaded.device
            self._offloaded.prefetch(0)
        if self._generators is None:  # the user's own
            self._generators = held_generators(self._model, forward)
        generators = [*all_generators([device]), *self._generators]
        conditions = Conditions(generators, accelerators([torch.empty(0, device=device)]))
        copies = self._outside.copies()
        self.current = current = MicroBatch(retake, forward)
        try:
            yield
        except BaseException:
            self.current = None
            raise
        if current.calls:
            current.check_turn(len(self._blocks), self._blocks)
        conditions.advance()
        self._learned.note(conditions)
        current.close(conditions, self._outside.moved(copies))

    def finish(self) -> MicroBatch:
        """The micro-batch's loss has gone backward. Returns what it has left."""
        current, self.current = self.current, None
        assert current is not None
        current.finish_tail(self.tail)
        return current

    def call(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block is called. Returns its outputs."""
        inputs = Inputs(args, kwargs)
        if self.reaching:
            raise Reached(place, inputs)
        block, current = self._blocks[place], self.current
        if current is not None and current.done and place >= self.tail:  # by a checkpoint around it
            return called(block.module, args, kwargs)
        if current is None or current.done:
            raise ValueError(
                f"The block {block.path!r} was called in a backward pass. Is it called inside of "
                "torch.utils.checkpoint? Leave that out: with `blocks`, each block is recomputed in any case."
            )
        current.check_turn(place, self._blocks)
        before = attributes_of(block.module) if self._proving else {}
        with self._around(place):
            if place < self.tail and torch.is_grad_enabled():
                self._note_state(place)
            with self._on_device(place):
                outputs = self._first_pass(place, inputs, current)
        if self._proving:
            now = attributes_of(block.module)
            left = [name for name, value in now.items() if value is not before.get(name)]
            if left:
                self.left[block.path] = left
        return outputs

    def _on_device(self, place: int) -> contextlib.AbstractContextManager[None]:
        """Around a block that is here, or comes."""
        if self._offloaded is None:
            return contextlib.nullcontext()
        return self._offloaded.on_device(place, following=place + 1)

    def _first_pass(self, place: int, inputs: Inputs, current: MicroBatch) -> Any:
        if not torch.is_grad_enabled():
            current.calls.append(None)
            return called(self._blocks[place].module, inputs.args, inputs.kwargs)
        call = BlockCall(self._blocks[place], inputs, current.given)
        if place >= self.tail:
            self._note(place, call, current)
            return call.run_with_graph()
        state = self.states[place]
        devices = accelerators([*tensors_of(inputs), *state.parameters])
        given = held_generators(*(leaf for _, leaf in leaves(inputs)), *(self._generators or ()))
        watched = [generator for generator in all_generators(devices) if self._learned.is_watched(generator)]
        differentiated = bool(call.roots) or any(parameter.requires_grad for parameter in state.parameters)
        if differentiated:
            self._note(place, call, current)
        else:
            current.calls.append(None)
        return call.run(
            [*watched, *state.generators, *given],
            devices,
            self._buffers[place],
            self._store,
            state.tensors,
            differentiated=differentiated,
        )

    def _note(self, place: int, call: BlockCall, current: MicroBatch) -> None:
        current.calls.append(call)
        if self._notes_leaves:
            for leaf in {leaf for root in call.roots.values() for leaf in leaves_of(root)}:
                self.reached[leaf] = min(place or -1, self.reached.get(leaf, place))
        current.note_roots(place, call)

    def _note_state(self, place: int) -> None:
        """What the block holds: gathered, where it is sharded, and not copied to a device yet."""
        if place not in self.states:
            self.states[place] = state = ModuleContents(self._blocks[place].module)
            self._buffers[place] = MovedBuffers(state.buffers)
