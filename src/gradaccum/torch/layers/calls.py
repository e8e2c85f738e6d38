"""One block's call on one micro-batch: run without a graph, and again with one when its turn comes in backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.private import run_backward
from gradaccum.torch.chunking.gradients import backward_roots
from gradaccum.torch.chunking.recompute import Conditions
from gradaccum.torch.chunking.trees import Inputs, is_floating, tensors_of
from gradaccum.torch.layers.arguments import Arguments, GivenTensors, replaced, tensors_in
from gradaccum.torch.layers.blocks import Block
from gradaccum.torch.layers.interception import called
from gradaccum.torch.layers.offload import Store, Waiting

__all__ = ["BlockCall", "MovedBuffers", "buffers_as_found"]

Place = tuple[dict[str, Any], str, Tensor]
"""Where a buffer is held: a dict, its key there, the buffer."""


class MovedBuffers:
    """Buffers that passes move, as each pass found them, so that it finds them so again."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = list(places)

    @torch.no_grad()
    def copies(self) -> list[tuple[Place, Tensor, int]]:
        """As they are now, before a first pass."""
        return [
            ((holder, name, buffer), buffer.clone(), -1 if buffer.is_inference() else buffer._version)
            for holder, name, _ in self._places
            if (buffer := holder.get(name)) is not None
        ]

    def moved(self, copies: list[tuple[Place, Tensor, int]]) -> list[tuple[Place, Tensor]]:
        """After it: the copies of those that it has moved. The others are left alone from here on."""
        moved = [
            (place, copy)
            for place, copy, version in copies
            # PyTorch's normalisation kernels don't raise the version of the statistics they move.
            if place[0].get(place[1]) is not place[2] or place[2]._version != version or place[1].startswith("running_")
        ]
        if len(moved) < len(self._places):
            names = {(id(holder), name) for (holder, name, _), _ in moved}
            self._places = [place for place in self._places if (id(place[0]), place[1]) in names]
        return moved


@contextlib.contextmanager
def buffers_as_found(copies: list[tuple[Place, Tensor]]) -> Iterator[None]:
    """Around a repetition: it finds these buffers, and what it does to them is forgotten."""
    held = [(holder, name, holder.get(name)) for (holder, name, _), _ in copies]
    try:
        for (holder, name, _), copy in copies:
            holder[name] = copy.clone()
        yield
    finally:
        for holder, name, buffer in held:
            holder[name] = buffer


class BlockCall:
    """What it takes to run a block's call again, and the gradients of its outputs as they arrive.

    Its outputs are what it returns and what it writes to its arguments. `given`: as for `Arguments`.
    """

    def __init__(self, block: Block, inputs: Inputs, given: GivenTensors) -> None:
        self.block, self._inputs = block, inputs
        self._arguments = Arguments(inputs, given)
        self.roots = {place: t for place, t in enumerate(self._arguments.tensors) if t.requires_grad}
        """The tensors among the inputs that pass gradients on, by place, until somebody has numbered them."""
        self.keys: dict[int, int] = {}
        """Their numbers, by place."""
        self._is_first = not self.roots  # no gradient reaches beyond it
        self._waiting: list[Waiting] = []
        self._conditions: Conditions | None = None
        self._buffers: list[tuple[Place, Tensor]] = []
        self._grads: list[Tensor | None] = []  # of its outputs
        self._leaves: dict[int, Tensor] = {}  # where its graph begins, by place among the inputs

    @property
    def drawn(self) -> list[Any]:
        """The generators that its first pass has drawn from."""
        return [] if self._conditions is None else [*self._conditions.random.states]

    # The first pass.

    def run(
        self,
        generators: Sequence[Any],
        devices: Sequence[torch.device],
        buffers: MovedBuffers,
        store: Store,
        held: Collection[int],
        *,
        differentiated: bool,
    ) -> Any:
        """The outputs, without a graph of the inside; `differentiated`: whether they pass gradients on to the block.

        `held`: tensors that the block holds, by id.
        """
        inputs, self._inputs = self._inputs, Inputs((), {})
        if not differentiated:
            with torch.no_grad():
                return called(self.block.module, inputs.args, inputs.kwargs)
        given = self._arguments.tensors
        versions = [None if tensor.is_inference() else tensor._version for tensor in given]
        before = {id(tensor): tensor for tensor in tensors_in(inputs)}
        outputs: Any = None
        made: list[Tensor] = []

        def first_pass() -> tuple[list[Tensor], list[Tensor]]:
            nonlocal outputs
            copies, conditions = buffers.copies(), Conditions([*generators], devices)
            # Where no input wants a gradient, the outputs may not either, as those of a reentrant checkpoint.
            with torch.set_grad_enabled(self._is_first):
                outputs = called(self.block.module, inputs.args, inputs.kwargs)
            conditions.advance()
            self._conditions, self._buffers = conditions, buffers.moved(copies)
            made.extend(_made(outputs, inputs, before))
            self._grads = [None] * len(made)
            # What the module holds, or was called with, gets no graph; and a view could not be edited in place.
            flat = [t.data if t.requires_grad or id(t) in before or id(t) in held else t for t in made]
            passes = [is_floating(tensor) and (tensor.requires_grad or not self._is_first) for tensor in made]
            return flat, [tensor for tensor, passes_on in zip(flat, passes, strict=True) if not passes_on]

        flat = _Boundary.apply(self, first_pass, torch.zeros((), requires_grad=True))
        for tensor, version in zip(given, versions, strict=True):
            if version is not None and tensor._version != version:
                raise ValueError(self._edits(f" of shape {tuple(tensor.shape)}"))
        new = {id(old): tensor for old, tensor in zip(made, flat, strict=True) if old is not tensor}
        replaced(inputs, {old: tensor for old, tensor in new.items() if old not in before})
        self._arguments.close()
        self._waiting = [store.keep(tensor) for tensor in given]
        self._arguments.tensors = []
        return replaced(outputs, new)

    def _edits(self, which: str) -> str:
        return (
            f"The block {self.block.path!r} edits an input{which} in place, so it can't be run again on the same "
            "inputs. Its first operation may have inplace=True; or give it a clone."
        )

    def run_with_graph(self) -> Any:
        """The outputs, with the graph that begins at what it is called with: it won't run again."""
        inputs, self._inputs = self._inputs, Inputs((), {})
        tensors, self._arguments.tensors = self._arguments.tensors, []
        self._leaves = {place: tensors[place].detach().requires_grad_() for place in self.keys}
        leaves = {id(tensors[place]): leaf for place, leaf in self._leaves.items()}
        tensor_of = {id(leaf): tensors[place] for place, leaf in self._leaves.items()}
        inputs = replaced(inputs, leaves)  # what it writes goes to the user's own objects
        try:
            return called(self.block.module, inputs.args, inputs.kwargs)
        except RuntimeError as error:
            if "leaf Variable that requires grad is being used in an in-place" not in str(error):
                raise
            raise ValueError(self._edits("")) from error
        finally:
            replaced(inputs, tensor_of)

    # The second pass.

    def prefetch(self) -> None:
        """It will run again soon."""
        for waiting in self._waiting:
            waiting.prefetch()

    def arrive(self, grads: Sequence[Tensor | None]) -> None:
        """Gradients of the outputs have come, in one backward pass of maybe several."""
        for place, grad in enumerate(grads):
            if grad is not None:
                known = self._grads[place]
                self._grads[place] = grad if known is None else known + grad

    def again(self) -> dict[int, Tensor]:
        """Run the call again, with a graph, and backward. Returns the gradients of what was in `roots`, by place."""
        if all(grad is None for grad in self._grads):
            return {}
        if any(waiting.edited for waiting in self._waiting):
            raise ValueError(f"An input of the block {self.block.path!r} was edited in place after its call.")
        assert self._conditions is not None
        tensors = [waiting.get() for waiting in self._waiting]
        self._leaves = {place: tensors[place].detach().requires_grad_() for place in self.keys}
        inputs = self._arguments.filled([self._leaves.get(place, tensor) for place, tensor in enumerate(tensors)])
        before = {id(tensor): tensor for tensor in tensors_in(inputs)}
        with torch.enable_grad(), buffers_as_found(self._buffers), self._conditions.restored():
            outputs = called(self.block.module, inputs.args, inputs.kwargs)
        made = _made(outputs, inputs, before)
        if len(made) != len(self._grads):
            raise NotEquivalentError(
                f"The block {self.block.path!r} returned {len(self._grads)} tensors, and {len(made)} when backward ran "
                "it again."
            )
        del outputs, inputs, before
        roots, given = backward_roots(made, self._grads)
        del made
        if roots:
            run_backward(roots, given)
        return self.arrived()

    def arrived(self) -> dict[int, Tensor]:
        """The graph has gone backward. Returns the gradients of what was in `roots`, by place, and drops it."""
        leaves, self._leaves = self._leaves, {}
        return {place: leaf.grad for place, leaf in leaves.items() if leaf.grad is not None}


def _made(outputs: Any, inputs: Inputs, before: dict[int, Tensor]) -> list[Tensor]:
    """The tensors that a call has returned, or put into its arguments. In objects, those from before don't count."""
    returned = {id(tensor) for tensor in tensors_of(outputs)}
    return [tensor for tensor in tensors_in((outputs, inputs)) if id(tensor) in returned or id(tensor) not in before]


class _Boundary(torch.autograd.Function):
    """Where a micro-batch's graph ends, to go on when it is the block's turn."""

    @staticmethod
    def forward(
        ctx: Any, call: BlockCall, run: Callable[[], tuple[list[Tensor], list[Tensor]]], anchor: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        flat, constant = run()
        if torch.is_autocast_cache_enabled():  # copies made here, without a graph, would hide tied weights from a loss
            torch.clear_autocast_cache()
        ctx.mark_non_differentiable(*constant)
        return tuple(flat)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.call.arrive(grads)
        return None, None, None
