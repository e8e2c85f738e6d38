"""Micro-batches whose blocks run while these are there for the first one, so that each comes once in a forward pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.on_torch.batch import Batch, leaves, map_leaves
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.on_torch.random_state import is_generator
from gradaccum.torch.buffers import Attributes
from gradaccum.torch.chunking.recompute import Conditions, accelerators
from gradaccum.torch.chunking.trees import Inputs, copied, tensors_of, with_tensors, without_tensors
from gradaccum.torch.equivalence import Replay
from gradaccum.torch.layers.blocks import Block
from gradaccum.torch.layers.calls import Reached, Ready
from gradaccum.torch.layers.interception import called
from gradaccum.torch.layers.offload import Store
from gradaccum.torch.layers.visits.companion import Companion, Key, Origins, Run, alike, version_of
from gradaccum.torch.layers.written import MovedBuffers, Objects, lent

__all__ = ["Companions", "Pass"]

logger = logging.getLogger("gradaccum")

_UNFORESEEN = "is called, in another micro-batch than the first, with what could not be foreseen"


class Pass:
    """A block's call in the first micro-batch's own pass: what the companions' calls are foreseen by.

    Args:
        place: The block's.
        inputs: What it is called with.
        module: The block.
        keys: Where the tensors among these come from.
        buffers: The block's.
    """

    def __init__(
        self, place: int, inputs: Inputs, module: nn.Module, keys: list[Key | None], buffers: MovedBuffers
    ) -> None:
        self.place, self.inputs, self.module, self.keys = place, inputs, module, keys
        self._versions = [version_of(tensor) for tensor in tensors_of(inputs)]
        self._attributes = _attributes(module)
        self._buffers, self._copies = buffers, buffers.copies()
        self._objects = bool(Objects().found(inputs)) or any(is_generator(leaf) for _, leaf in leaves(inputs))

    def alone(self) -> str:
        """After the call: why it may not be foreseen for others; empty if it may."""
        if _hooked(self.module):
            return "has hooks on its forward pass"
        if self._objects:
            return "is called with an object that it may write to"
        now = _attributes(self.module)
        same = len(now) == len(self._attributes) and all(
            a is b and m == n for (a, m), (b, n) in zip(now, self._attributes, strict=True)
        )
        if self._buffers.moved(self._copies) or not same:
            return "moves buffers or attributes"
        if self._versions != [version_of(tensor) for tensor in tensors_of(self.inputs)]:
            return "edits what it is called with"
        return ""


class Companions:
    """The micro-batches after the first: blocks that are there for the first one run on them, too.

    What a block is called with on them is foreseen: where the first one hands on what a block before has returned, or
    was called with, the others will; else their own code is run up to there. When their own pass comes, each call
    is compared with what was foreseen, and the block comes once more if it was something else.

    Args:
        model: The model.
        blocks: Its blocks.
        store: Where activations wait.
        device: Where the blocks compute.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block], store: Store, device: torch.device) -> None:
        self._model, self._blocks, self._store, self._device = model, blocks, store, device
        self._told: set[str] = set()
        self._inside = [module for block in blocks for module in block.module.modules()]
        self.clear()

    def clear(self) -> None:
        """The window is over."""
        self._coming: dict[int, Companion] = {}
        self._own: Companion | None = None
        self._partly: Companion | None = None
        self._target = -1
        self._origins: Origins | None = None
        self._run: Run | None = None
        self._base: Conditions | None = None
        self._forward: Callable[[Batch], Any] | None = None

    def gather(self, retakes: Sequence[Callable[[], Batch]]) -> None:
        """A window begins with these micro-batches.

        Args:
            retakes: Each returns one of them.
        """
        self.clear()
        if len(retakes) < 2:
            return
        if any(isinstance(module, _BatchNorm) and module.training for module in self._model.modules()):
            self._tell("Each block", "is in a model with BatchNorm, whose statistics move in each pass")
            return
        self._coming = {index: Companion(retake, self._device) for index, retake in enumerate(retakes) if index}
        self._base = Conditions((), accelerators([torch.empty(0, device=self._device)]))

    @contextmanager
    def micro_batch(self, index: int, forward: Callable[[Batch], Any]) -> Iterator[None]:
        """Around a micro-batch's own pass.

        Args:
            index: Its number in the window.
            forward: Computes its loss.
        """
        self._forward = forward
        self._own = own = self._coming.pop(index, None)
        self._origins = Origins() if index == 0 and self._coming else None
        if own is not None:
            own.begin()
        try:
            yield
        except BaseException:
            self._coming = {}  # what comes now is something else
            raise
        finally:
            self._own = self._origins = None
            if own is not None:
                own.leave()

    # A companion's calls.

    @property
    def reaching(self) -> bool:
        """Whether a companion's code runs, to see what a block is called with."""
        return self._partly is not None

    def reached(self, place: int, inputs: Inputs) -> Any:
        """It calls a block. Returns what the block has returned, if it has run on this one."""
        assert self._partly is not None
        companion = self._partly
        run = None
        if place < self._target:
            setting = companion.runs[place].setting if place < len(companion.runs) else None
            run = companion.run_of(place, inputs, setting, self._store)
        if run is None:
            raise Reached(place, inputs)
        outputs = map_leaves(copied, run.ready(inputs).outputs)  # its code may edit them, and comes once more
        companion.passed(place, outputs)
        return outputs

    def _ready(self, place: int, inputs: Inputs, begins: bool) -> Ready | None:
        """What the block has made of these inputs of a companion's own pass; None if it has to come."""
        own = self._own
        if own is None or not own.goes_on:
            return None
        run = own.run_of(place, inputs, self._setting(place, inputs, begins), self._store)
        if run is None:
            own.goes_on = False
            own.leave()
            if place < len(own.runs):
                self._tell(f"The block {self._blocks[place].path!r}", _UNFORESEEN)
            return None
        self._run = run
        return run.ready(inputs)

    def run(
        self,
        place: int,
        inputs: Inputs,
        run: Callable[[Ready | None], Any],
        visit: AbstractContextManager[None],
        buffers: MovedBuffers,
        generators: Sequence[Any],
        begins: bool,
    ) -> Any:
        """A block is called in a micro-batch's own pass. Returns its outputs.

        Args:
            place: The block's.
            inputs: What it is called with.
            run: Runs it, or takes what it has made before.
            visit: Around what it computes.
            buffers: The block's.
            generators: What it may draw from.
            begins: Whether outputs may want a gradient though no input does.
        """
        ready = self._ready(place, inputs, begins)
        if ready is not None:
            outputs = run(ready)
            assert self._own is not None
            assert self._run is not None
            self._run.share(outputs, self._store)
            self._own.passed(place, outputs)
            return outputs
        seen = self._observed(place, inputs, buffers)
        with visit:
            outputs = run(None)
            if seen is not None:
                self._follow(seen, outputs, generators, begins)
        return outputs

    # The first one's.

    def _observed(self, place: int, inputs: Inputs, buffers: MovedBuffers) -> Pass | None:
        """The first micro-batch calls a block; None if nobody comes with it."""
        if self._origins is None or not self._coming:
            return None
        tensors = tensors_of(inputs)
        keys = [self._origins.of(tensor) for tensor in tensors]
        self._origins.note(place, "in", tensors)
        return Pass(place, inputs, self._blocks[place].module, keys, buffers)

    def _follow(self, seen: Pass, outputs: Any, generators: Sequence[Any], begins: bool) -> None:
        """The block is still here: it runs on all companions."""
        assert self._origins is not None
        block = self._blocks[seen.place]
        why = seen.alone()
        if why:
            self._tell(f"The block {block.path!r}", why)
            self._origins = None
            return
        self._origins.note(seen.place, "out", tensors_of(outputs))
        setting = self._setting(seen.place, seen.inputs, begins)
        for companion in self._coming.values():
            if companion.goes_on and len(companion.runs) == seen.place:
                run = self._run_on(companion, seen, setting, generators, begins)
                if run is None:
                    companion.goes_on = False
                    self._tell(f"The block {block.path!r}", _UNFORESEEN)
                    continue
                companion.runs.append(run)
                known = without_tensors((seen.inputs, outputs))
                companion.alike = companion.alike and alike((run.inputs, run.outputs), known)
        if torch.is_autocast_cache_enabled():  # copies made here, without a graph, would hide weights from a loss
            torch.clear_autocast_cache()

    def _run_on(
        self, companion: Companion, seen: Pass, setting: Any, generators: Sequence[Any], begins: bool
    ) -> Run | None:
        """The block runs on a companion; None if that comes to another one."""
        inputs, waiting = without_tensors(seen.inputs), []
        if seen.place and companion.alike and all(key is not None for key in seen.keys):
            waiting = [companion.waiting(key) for key in seen.keys if key is not None]
        else:
            found = self._reach(companion, seen.place)
            if found is None:
                return None
            inputs = without_tensors(found)
            waiting = [self._store.keep(tensor.detach()) for tensor in tensors_of(found)]
        given = with_tensors(inputs, [one.get() for one in waiting])
        conditions = Conditions(generators, accelerators(tensors_of(given)))
        try:
            with torch.set_grad_enabled(begins):
                outputs = called(seen.module, given.args, given.kwargs)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None  # its own pass will show whether that is an error
        conditions.advance()
        tensors, places = tensors_of(outputs), {id(tensor): place for place, tensor in enumerate(tensors_of(given))}
        same = [places.get(id(tensor), -1) for tensor in tensors]
        results = [
            waiting[place] if place >= 0 else self._store.keep(tensor.detach())
            for tensor, place in zip(tensors, same, strict=True)
        ]
        passes = [tensor.requires_grad for tensor in tensors]
        return Run(inputs, waiting, without_tensors(outputs), results, passes, same, setting, conditions)

    def _reach(self, companion: Companion, place: int) -> Inputs | None:
        """What a companion calls the block at this place with; None if it comes to another one."""
        inside = set(map(id, self._inside))
        around = [module for module in self._model.modules() if id(module) not in inside]
        buffers = [((m._buffers, name, b), b) for m in around for name, b in m._buffers.items() if b is not None]
        attributes = Attributes(self._model.modules())
        assert self._base is not None
        assert self._forward is not None
        Replay.rows_in_between()
        batch = companion.retake()
        self._partly, self._target = companion, place
        try:
            with torch.enable_grad(), lent(buffers), self._base.restored():
                companion.begin()
                self._forward(batch)
        except Reached as reached:
            reached.__traceback__ = None  # it holds everything that is alive
            return reached.inputs if reached.place == place else None
        finally:
            self._partly = None
            companion.leave()
            # The exception has left out what the user's code does after its forward pass, such as removing hooks;
            # and what it has left in attributes is another micro-batch's.
            attributes.put_back()
        return None

    def _setting(self, place: int, inputs: Inputs, begins: bool) -> Any:
        """What a call depends on besides its inputs."""
        module = self._blocks[place].module
        autocast = Conditions((), accelerators(tensors_of(inputs))).autocast
        return autocast, torch.is_grad_enabled(), begins, module.training, _hooked(module)

    def _tell(self, what: str, why: str) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.info("%s comes once for each micro-batch in forward passes, for it %s.", what, why)


def _attributes(module: nn.Module) -> list[tuple[Any, int]]:
    """What changes when somebody assigns to an attribute, or makes a container longer."""
    exchanged = ("_parameters", "_buffers")
    return [
        (value, len(value) if isinstance(value, (list, dict, set)) else -1)
        for layer in module.modules()
        for name, value in vars(layer).items()
        if name not in exchanged
    ]


def _hooked(module: nn.Module) -> bool:
    everywhere = vars(nn.modules.module)
    return any(m._forward_hooks or m._forward_pre_hooks for m in module.modules()) or any(
        everywhere.get(name) for name in ("_global_forward_hooks", "_global_forward_pre_hooks")
    )
