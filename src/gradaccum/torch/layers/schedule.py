"""Layer by layer: micro-batch by micro-batch forward, block by block backward, each block over all micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.core.sizes import Plan, Slice
from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.batch import Batch, leaves
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.on_torch.oom_retry import OomRetry, RestartWindow
from gradaccum.on_torch.private import leaves_of
from gradaccum.on_torch.random_state import Conditions, all_generators, kept
from gradaccum.on_torch.reach import held_generators
from gradaccum.on_torch.state import Snapshot
from gradaccum.torch.chunking.two_passes import (
    Inputs,
    accelerators,
    attributes_of,
    check_nothing_cached,
    tensors_of,
)
from gradaccum.torch.layers.backward_optimizer import BackwardOptimizer
from gradaccum.torch.layers.blocks import Block, called, intercepted
from gradaccum.torch.layers.calls import BlockCall, MicroBatch, Reached
from gradaccum.torch.layers.offload import OffloadChoice, OffloadedBlocks, Store
from gradaccum.torch.module_state import Contents, ModuleContents

_NO_CONTEXT = contextlib.nullcontext()


class Layers:
    """The blocks of a model, whose backward passes go block by block, each over all micro-batches.

    Forward, a micro-batch's blocks run without graphs, all but the last: what is kept is what they are called with. Its
    loss goes backward at once, down to what the last block was called with. When all micro-batches have come so far,
    the block before it runs again on each of them and passes their gradients on; then the one before that, and so on.
    What stands before the blocks (place -1) runs again at last.

    The last block runs again, too, where it is on the device only while it computes.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        offloaded: OffloadedBlocks | None = None,
        offload: OffloadChoice = False,
    ) -> None:
        self.model, self.blocks, self.offloaded = model, [*blocks], offloaded
        self.listener: Any = None
        """Updates parameters while backward goes on: a `BackwardOptimizer`."""
        self.failed = dict[str, Exception]()
        """How running a block again failed while something was proven, by path."""
        self.left = dict[str, list[str]]()
        """What blocks have kept in attributes while something was proven, by path."""
        self._modules, self._store = [block.module for block in self.blocks], Store(offload)
        # From the place of the tail on, blocks run once, with their graph.
        self._tail = len(self.blocks) - (self.offloaded is None)
        self._window = _Window(self, proving=False)

    def reachable(self) -> contextlib.AbstractContextManager[None]:
        """Around an update: blocks that live elsewhere can be called meanwhile, in passes of any kind."""
        return _NO_CONTEXT if self.offloaded is None else self.offloaded.reachable()

    def run(
        self,
        plan: Plan,
        forward_and_loss: Callable[[Slice], None],
        oom: OomRetry,
        window: Any,
        *,
        proving: bool,
    ) -> None:
        """All passes of a window, whose loss and divisor the listener asks for."""
        listener = self.listener
        check_nothing_cached()
        self._window = _Window(self, proving=proving)
        if listener is not None:
            listener.open()
        with intercepted(self._modules, self._call):
            try:
                for piece in plan:
                    forward_and_loss(piece)
                if listener is not None:
                    listener.begin(window, self._window.reached, rehearsal=proving)
                self._backward_that_fits(plan, oom)
            except BaseException as error:
                explained = error if listener is None else listener.explained(error)
                if explained is error:
                    raise
                raise explained from error
            finally:
                self._forget()

    def _forget(self) -> None:
        self._window = _Window(self, proving=False)
        if self.offloaded is not None:
            self.offloaded.forget()

    # Forward.

    @contextlib.contextmanager
    def micro_batch(self, retake: Callable[[], Batch], forward: Callable[[Batch], Any]) -> Iterator[None]:
        """Around a micro-batch's forward pass."""
        window, device = self._window, next((p.device for p in self.model.parameters()), torch.device("cpu"))
        if self.offloaded is not None:
            device = self.offloaded.device
            self.offloaded.prefetch(0)
        if window.generators is None:  # the user's own
            window.generators = held_generators(self.model, forward)
        devices = accelerators([torch.empty(0, device=device)])
        start = Conditions([*all_generators([device]), *window.generators], devices)
        window.current = current = MicroBatch(retake, forward, start)
        try:
            yield
        except BaseException:
            window.current = None
            raise
        if current.calls:
            current.check_turn(len(self.blocks), self.blocks)
        start.advance()
        current.done = True

    def _call(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block is called. Returns its outputs."""
        block, window = self.blocks[place], self._window
        if window.reaching:
            raise Reached(place, Inputs(args, kwargs))
        current = window.current
        if current is not None and current.done and place >= self._tail:  # by a checkpoint around it
            return called(block.module, args, kwargs)
        if current is None or current.done:
            raise ValueError(
                f"The block {block.path!r} was called in a backward pass. If a torch.utils.checkpoint is around it, "
                "remove that: `blocks` recomputes each block already."
            )
        current.check_turn(place, self.blocks)
        attributes = attributes_of(block.module) if window.proving else {}
        again = place < self._tail and torch.is_grad_enabled()
        if again and place not in window.states:
            window.states[place] = ModuleContents(block.module)
        with self._on_device(place, place + 1):
            outputs = self._first_pass(place, Inputs(args, kwargs), current)
        if window.proving:
            items = attributes_of(block.module).items()
            left = [name for name, value in items if value is not attributes.get(name)]
            if left:
                self.left[block.path] = left
        return outputs

    def _on_device(self, place: int, following: int) -> contextlib.AbstractContextManager[None]:
        return _NO_CONTEXT if self.offloaded is None else self.offloaded.on_device(place, following=following)

    def _first_pass(self, place: int, inputs: Inputs, current: MicroBatch) -> Any:
        window, module = self._window, self._modules[place]
        if not torch.is_grad_enabled():
            current.calls.append(None)
            return called(module, inputs.args, inputs.kwargs)
        call = BlockCall(self.blocks[place], inputs, current.written)
        if place >= self._tail:
            self._note(place, call, current)
            return call.run_with_graph(inputs)
        state = window.states[place]
        if not (call.roots or any(parameter.requires_grad for parameter in state.parameters)):
            current.calls.append(None)
            with torch.no_grad():
                return called(module, inputs.args, inputs.kwargs)
        devices = accelerators([*tensors_of(inputs), *state.parameters])
        generators = held_generators(*(leaf for _, leaf in leaves(inputs)), *(window.generators or ()))
        self._note(place, call, current)
        start = Conditions([*all_generators(devices), *state.generators, *generators], devices)
        return call.run(inputs, start, self._store, state.tensors, current.written)

    def _note(self, place: int, call: BlockCall, current: MicroBatch) -> None:
        current.calls.append(call)
        if self.listener is not None:
            reached = self._window.reached
            for leaf in {leaf for root in call.roots.values() for leaf in leaves_of(root)}:
                reached[leaf] = min(place or -1, reached.get(leaf, place))
        current.note_roots(place, call)

    def shares(self, loss: Tensor) -> bool:
        """As `MicroBatch.shares`, of the one that has come forward."""
        current = self._window.current
        return current is not None and current.shares(loss)

    def commit(self, piece: Any) -> None:
        """The loss of this micro-batch has gone backward, so its blocks' gradients are due."""
        window = self._window
        current, window.current = window.current, None
        assert current is not None
        call = current.pop(self._tail)
        if call is not None:
            current.arrive(self._tail, call, call.arrived())
        if not (any(current.calls) or current.first_grads):
            return
        window.micro_batches.append(current)
        if window.largest is None or piece.size > window.largest.size:
            window.largest = piece

    # Backward.

    def _backward_that_fits(self, plan: Plan, oom: OomRetry) -> None:
        """Backward; where a block runs out of memory, the window starts over in smaller micro-batches."""
        piece = self._window.largest
        try:
            self._backward()
            return
        except Exception as error:
            begun = self.listener is not None and self.listener.made is not None
            if piece is None or begun or not is_out_of_memory(error):
                raise
            smaller = oom.smaller(error, piece, plan)
        self._forget()
        oom.meter.release()  # only here, out of reach of the error's frames, is its memory free
        raise RestartWindow(smaller)

    def _backward(self) -> None:
        """Block by block, each over all micro-batches; then what stands before the blocks."""
        window = self._window
        window.current = None
        waiting, window.micro_batches = window.micro_batches, []
        drawn = {g for micro_batch in waiting for g in micro_batch.drawn}  # and to be put back
        devices = accelerators(p for state in window.states.values() for p in state.parameters)
        with kept(drawn.union(all_generators(devices))):
            for place in range(len(self.blocks) - 1, -2, -1):
                if place < 0:
                    for micro_batch in waiting:
                        self._before_the_blocks(micro_batch)
                else:
                    self._turn(place, [m for m in waiting if m.calls[place] is not None])
                if self.listener is not None:
                    self.listener.finished(place)

    def _turn(self, place: int, waiting: list[MicroBatch]) -> None:
        """A block runs again on each of these micro-batches, and backward."""
        if not waiting:
            return
        window, block = self._window, self.blocks[place]
        with window.states[place].restored(), self._on_device(place, place - 1):
            passes = _SecondPasses([*block.module.modules()])
            for index, micro_batch in enumerate(waiting):
                last = index + 1 == len(waiting)
                following = waiting[0].calls[place - 1] if last else waiting[index + 1].calls[place]
                if following is not None:
                    following.prefetch()
                call = micro_batch.pop(place)
                assert call is not None
                try:
                    with passes.again():
                        if window.proving:
                            micro_batch.retake()
                        gradients = call.again()
                except Exception as error:
                    self.failed[block.path] = error
                    getattr(error, "add_note", str)(f"Raised where backward runs the block {block.path!r} again.")
                    raise
                micro_batch.arrive(place, call, gradients)

    def _before_the_blocks(self, micro_batch: MicroBatch) -> None:
        """The gradients of what the first block is called with, passed on to what stands before it."""
        if not micro_batch.first_grads:
            return
        window, batch = self._window, micro_batch.retake()
        with _SecondPasses(window.around, window.inside).again():
            window.reaching = True
            try:  # an exception leaves out what the user's code does after its forward pass, such as removing hooks
                roots, grads = micro_batch.reach(batch, self.blocks[0].path)
            finally:
                window.reaching = False
            if roots:
                torch.autograd.backward(roots, grads)


class _Window:
    """What the forward passes of a window leave for its backward passes."""

    def __init__(self, layers: Layers, *, proving: bool) -> None:
        self.proving, self.reaching = proving, False  # the latter: what stands before the blocks runs again
        self.inside = {module for block in layers.blocks for module in block.module.modules()}
        self.around = [module for module in layers.model.modules() if module not in self.inside]
        self.generators: list[Any] | None = None
        self.states = dict[int, ModuleContents]()
        """What blocks that run again hold, by place, not copied to a device yet."""
        self.reached = dict[int, int]()
        """Of what graphs between blocks lead to, by id, after which block's turn its gradient is in."""
        self.current: MicroBatch | None = None
        self.micro_batches: list[MicroBatch] = []
        self.largest: Any = None


class _SecondPasses:
    """Passes of modules that run again, each of which finds and leaves these as they are now."""

    def __init__(self, modules: Sequence[nn.Module], hooked: Iterable[nn.Module] = ()) -> None:
        self._contents, self._buffers = Contents(modules, hooked), Snapshot.of(modules).buffers

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._contents.put_back()
            if moved := [buffer for buffer in self._buffers if buffer.moved]:
                with torch.no_grad():
                    for buffer in moved:
                        buffer.reset()


@contextlib.contextmanager
def proof_of(layers: Layers) -> Iterator[None]:
    """Around a proof: where it fails, say which blocks have left something that backward can't know of."""
    updates = layers.listener if isinstance(layers.listener, BackwardOptimizer) else None
    layers.left.clear()
    layers.failed.clear()
    if updates is not None:
        updates.late = []
    try:
        yield
        for path, error in layers.failed.items():
            if not is_out_of_memory(error):
                raise NotEquivalentError(
                    f"BlockStep runs each block again in backward, and the block {path!r} failed there "
                    f"({type(error).__name__}: {error}). If it reads what the model stores in an attribute or a global "
                    "in each forward pass, it sees another micro-batch's: pass that to the block as an argument, or "
                    "leave it out of `blocks`."
                ) from error
        if updates is not None and updates.late:
            raise NotEquivalentError(
                f"With update='in_backward' these would be updated before their gradient is complete: "
                f"{', '.join(map(repr, updates.late[:5]))}. A block before their own reads them without having them "
                "among its parameters. Register them there, leave the block out of `blocks`, or use "
                "update='after_backward'."
            )
    except NotEquivalentError as error:
        if not layers.left:
            raise
        left = ", ".join(f"the block {path!r} ({', '.join(names)})" for path, names in layers.left.items())
        raise NotEquivalentError(
            f"{error}\nThese keep something from a call in attributes: {left}. With BlockStep, what a block gives "
            "to the loss must be among its outputs, because its forward pass has no graph; and what it keeps from one "
            "micro-batch to the next belongs to other rows."
        ) from error.__cause__
