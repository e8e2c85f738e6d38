"""One block's call on one micro-batch: run without a graph, and again when its gradients' turn has come."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.private import graph_of, run_backward
from gradaccum.torch.chunking.gradients import backward_roots
from gradaccum.torch.chunking.recompute import Conditions
from gradaccum.torch.chunking.trees import Inputs, is_floating, tensors_of, with_tensors, without_tensors
from gradaccum.torch.layers.blocks import Block
from gradaccum.torch.layers.interception import called
from gradaccum.torch.layers.offload import Store, Waiting
from gradaccum.torch.layers.written import MovedBuffers, Objects, Place, lent

__all__ = ["BlockCall", "MicroBatch", "Reached"]

_ORDER = (
    "`blocks` must be called once each, in their order, in the forward pass of every micro-batch. {what} Leave out of "
    "`blocks` what is called otherwise, or list the modules in the order in which they are called."
)


_EDITS = (
    "{name} edits an input{which} in place, so it can't be run again on the same inputs. Its first operation may have "
    "inplace=True; or give it a clone."
)


class BlockCall:
    """What it takes to run a block's call again, and the gradients of its outputs as they arrive.

    Args:
        block: What is called.
        args: With what.
        kwargs: With what, by name.
    """

    def __init__(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.block = block
        self._given = Inputs(args, kwargs)
        found = tensors_of(self._given)
        self._skeleton = without_tensors(self._given)
        self._tensors: list[Waiting] = []
        first = {id(tensor): place for place, tensor in reversed(list(enumerate(found)))}
        self._same = [first[id(tensor)] for tensor in found]
        self.roots = {place: found[place] for place in sorted(set(self._same)) if found[place].requires_grad}
        """The tensors among the inputs that pass gradients on, by place, until somebody has numbered them."""
        self.keys: dict[int, int] = {}
        """Their numbers, by place."""
        self._begins = not self.roots
        """Whether no gradient reaches beyond it."""
        self._conditions: Conditions | None = None
        self._buffers: list[tuple[Place, Tensor]] = []
        self._skeleton_of_outputs: Any = None
        self.grads: list[Tensor | None] = []
        """Of the tensors in the outputs."""
        self._began: dict[int, Tensor] = {}
        """Where its graph begins, by place among the inputs."""
        self.passes: list[bool] = []
        """Whether each of them passes gradients on to the block."""

    def run(
        self,
        objects: Objects,
        generators: Sequence[Any],
        devices: Sequence[torch.device],
        buffers: MovedBuffers,
        store: Store,
        *,
        differentiated: bool,
    ) -> Any:
        """The outputs, without a graph of the block's inside.

        Args:
            objects: Those of the micro-batch.
            generators: What the block may draw random numbers from.
            devices: Accelerators that it uses.
            buffers: The block's.
            store: Where the inputs wait.
            differentiated: Whether the outputs pass gradients on to the block.
        """

        def first_pass() -> Any:
            found, copies = objects.found(self._given), buffers.copies()
            conditions = Conditions([*generators], devices)
            # Where no input wants a gradient, the outputs may not either, as those of a reentrant checkpoint.
            with torch.set_grad_enabled(differentiated and self._begins):
                outputs = called(self.block.module, self._given.args, self._given.kwargs)
            conditions.advance()
            self._conditions, self._buffers = conditions, buffers.moved(copies)
            self._skeleton = objects.as_found(self._skeleton, found)
            return outputs

        if not differentiated:
            with torch.no_grad():
                return first_pass()
        given = tensors_of(self._given)
        versions = [None if tensor.is_inference() else tensor._version for tensor in given]
        flat = _Boundary.apply(self, first_pass, torch.zeros((), requires_grad=True))
        for tensor, version in zip(given, versions, strict=True):
            if version is not None and tensor._version != version:
                raise ValueError(_EDITS.format(name=self._name, which=f" of shape {tuple(tensor.shape)}"))
        self._tensors = [store.keep(tensor) for tensor in given]
        self._given = Inputs((), {})
        return with_tensors(self._skeleton_of_outputs, flat)

    @property
    def drawn(self) -> list[Any]:
        """The generators that its first pass has drawn from."""
        return [] if self._conditions is None else [*self._conditions.random.states]

    @property
    def begins(self) -> bool:
        """Whether no gradient reaches beyond it, while somebody has not numbered what does."""
        return self._begins

    @property
    def _name(self) -> str:
        return f"The block {self.block.path!r}"

    def flattened(self, outputs: Any) -> tuple[Tensor, ...]:
        """The tensors in the outputs, each an object of its own."""
        self._skeleton_of_outputs = without_tensors(outputs)
        found, seen = [], {id(tensor) for tensor in tensors_of(self._given)}
        self.passes = [is_floating(t) and (t.requires_grad or not self._begins) for t in tensors_of(outputs)]
        for tensor in tensors_of(outputs):
            found.append(tensor.detach() if id(tensor) in seen or tensor.requires_grad else tensor)
            seen.add(id(tensor))
        self.grads = [None] * len(found)
        return tuple(found)

    def prefetch(self) -> None:
        """It will run again soon."""
        for waiting in self._tensors:
            waiting.prefetch()

    def arrive(self, grads: Sequence[Tensor | None]) -> None:
        """Gradients of the outputs have come, in one backward pass of maybe several."""
        for place, grad in enumerate(grads):
            if grad is not None:
                known = self.grads[place]
                self.grads[place] = grad if known is None else known + grad

    def again(self) -> dict[int, Tensor]:
        """Run the call again, with a graph, and backward. Returns the gradients of what was in `roots`, by place."""
        if all(grad is None for grad in self.grads):
            return {}
        if any(waiting.edited for waiting in self._tensors):
            raise ValueError(f"An input of the block {self.block.path!r} was edited in place after its call.")
        assert self._conditions is not None
        tensors: list[Any] = [
            waiting.get() if place == self._same[place] else None for place, waiting in enumerate(self._tensors)
        ]
        with torch.enable_grad(), lent(self._buffers), self._conditions.restored():
            outputs = self._with_graph(self._skeleton, tensors)
        self._check_count(outputs)
        roots, given = backward_roots(outputs, self.grads)
        if roots:
            run_backward(roots, given)
        return self.arrived()

    def run_with_graph(self) -> Any:
        """The outputs, with the graph that begins at what it is called with: it won't run again."""
        given, self._given = tensors_of(self._given), Inputs((), {})
        try:
            return self._with_graph(self._skeleton, given)
        except RuntimeError as error:
            if "leaf Variable that requires grad is being used in an in-place" not in str(error):
                raise
            raise ValueError(_EDITS.format(name=self._name, which="")) from error

    def _with_graph(self, skeleton: Any, tensors: Sequence[Any]) -> Any:
        self._began = {place: tensors[place].detach().requires_grad_() for place in self.keys}
        inputs = with_tensors(skeleton, [self._began.get(place, tensors[place]) for place in self._same])
        return called(self.block.module, inputs.args, inputs.kwargs)

    def arrived(self) -> dict[int, Tensor]:
        """The graph has gone backward. Returns the gradients of what was in `roots`, by place, and drops it."""
        began, self._began = self._began, {}
        return {place: tensor.grad for place, tensor in began.items() if tensor.grad is not None}

    def _check_count(self, outputs: Any) -> None:
        if (count := len(tensors_of(outputs))) != len(self.grads):
            raise NotEquivalentError(
                f"{self._name} returned {len(self.grads)} tensors, and {count} when backward ran it again."
            )


class _Boundary(torch.autograd.Function):
    """Where a micro-batch's graph ends, to go on when it is the block's turn."""

    @staticmethod
    def forward(ctx: Any, call: BlockCall, run: Callable[[], Any], anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        flat = call.flattened(run())
        if torch.is_autocast_cache_enabled():  # copies made here, without a graph, would hide tied weights from a loss
            torch.clear_autocast_cache()
        ctx.mark_non_differentiable(*[tensor for tensor, passes in zip(flat, call.passes, strict=True) if not passes])
        return flat

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.call.arrive(grads)
        return None, None, None


def _ends(node: Any) -> bool:
    """Whether a graph ends here, with nothing that a backward pass frees."""
    return hasattr(node, "variable") or isinstance(getattr(node, "call", None), BlockCall)


class Reached(BaseException):  # no error, and nothing that a loss would catch
    """The model has come to a block, which is far enough."""

    def __init__(self, place: int, inputs: Inputs) -> None:
        super().__init__()
        self.place, self.inputs = place, inputs


class MicroBatch:
    """What a micro-batch's forward pass leaves for backward."""

    def __init__(self, retake: Callable[[], Batch], forward: Callable[[Batch], Any]) -> None:
        self.retake, self.forward = retake, forward
        self.objects = Objects()
        self.calls: list[BlockCall | None] = []
        self.conditions: Conditions | None = None
        self.buffers: list[Any] = []
        self.done = False
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
        """Its forward pass is over.

        Args:
            conditions: Those that it began with.
            buffers: Those around the blocks that it has moved.
        """
        self.conditions, self.buffers, self.done = conditions, buffers, True
        self.objects = Objects()  # which would hold what the blocks have written to

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
        own = set() if self.conditions is None else set(self.conditions.random.states)
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
        """A block's inputs have gradients. Those that no other block waits for are passed on.

        Args:
            place: The block's.
            call: Its call.
            found: The gradients, by place among its inputs.
        """
        for index, grad in found.items():
            key = call.keys[index]
            self._grads[key] = self._grads[key] + grad if key in self._grads else grad
        if place == 0:
            grads = self._grads
            self.first_grads = {index: grads.pop(key) for key, index in self._first_places.items() if key in grads}
            return
        due = self._due.pop(place, {})
        roots = [(root, self._grads.pop(key)) for key, root in due.items() if key in self._grads]
        if roots:  # two of them may come from the same tensors, at different times
            torch.autograd.backward([root for root, _ in roots], [grad for _, grad in roots], retain_graph=True)

    def reach(self, batch: Batch, first: str) -> tuple[list[Tensor], list[Tensor]]:
        """What stands before the blocks runs again. Returns what the first block is called with, and its gradients.

        Args:
            batch: The micro-batch, taken once more.
            first: The first block's path.

        Raises:
            ValueError: That block is called with something else than before.
        """
        assert self.conditions is not None
        grads = self.first_grads
        with torch.enable_grad(), lent(self.buffers), self.conditions.restored():
            try:
                self.forward(batch)
            except Reached as reached:
                reached.__traceback__ = None
                place, inputs = reached.place, reached.inputs
            else:
                raise AssertionError("the first pass came to a block")
        tensors = tensors_of(inputs)
        if place != 0 or len(tensors) <= max(grads) or any(tensors[i].shape != g.shape for i, g in grads.items()):
            raise ValueError(
                f"What the block {first!r} is called with was something else when backward ran the model "
                "up to there again. Does the loss take something from an iterator, or count its calls?"
            )
        found = [(tensors[index], grad) for index, grad in grads.items() if tensors[index].requires_grad]
        return [root for root, _ in found], [grad for _, grad in found]
