"""What a micro-batch's forward pass leaves for backward, in which its blocks' calls run again with a graph."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import itertools
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.weak import WeakIdKeyDictionary

from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.batch import Batch, children, rebuild
from gradaccum.on_torch.private import graph_of, run_backward
from gradaccum.on_torch.random_state import is_generator
from gradaccum.torch.chunking.two_passes import Conditions, Inputs, backward_roots, is_floating, tensors_of, version_of
from gradaccum.torch.layers.blocks import Block, called
from gradaccum.torch.layers.offload import Store, Waiting

_AS_THEY_ARE = (nn.Module, type, enum.Enum, types.FunctionType, types.MethodType, types.ModuleType, torch.dtype)
_PLAIN = {str, bool, int, float, type(None), torch.device, torch.dtype, torch.Size}

GivenTensors = dict[int, tuple[Any, list[Tensor]]]
"""Of each object, by id, the tensors that it had when the first block of a micro-batch was called with it."""


class _Slot(int):
    """Stands for a tensor in a copy of the arguments, by its number, so that nobody holds the tensor twice."""

    __slots__ = ()


class Arguments:
    """The arguments of a block's call, as they are before it: in containers, in caches and other objects.

    A block that runs again must find them as they were: the cache without the keys and values that it has put there
    since. Of objects, tensors that other blocks have put there since the first one (`given`) are replaced by shapes: a
    cache of all blocks' keys and values would take the memory of all blocks.

    Example:
        >>> cache = types.SimpleNamespace(keys=[])
        >>> arguments = Arguments(Inputs((torch.ones(2), cache), {}), {})
        >>> cache.keys.append(torch.ones(2))            # what the block does
        >>> arguments.filled(arguments.tensors).args[1].keys
        []
    """

    def __init__(self, inputs: Inputs, given: GivenTensors) -> None:
        nodes = _nodes(inputs, into_objects=False)
        self.tensors, others = [node for node in nodes if isinstance(node, Tensor)], dict[int, Tensor]()
        direct = {id(tensor) for tensor in self.tensors}
        for node in filter(_is_written_to, nodes):
            inside = tensors_in(node)
            own = {id(tensor) for tensor in given.setdefault(id(node), (node, inside))[1]}
            for tensor in inside:
                if id(tensor) not in own:  # only its shape
                    others[id(tensor)] = torch.empty_like(tensor, device="meta", requires_grad=False)
                elif not tensor.requires_grad:
                    others[id(tensor)] = tensor
                elif id(tensor) not in direct:
                    direct.add(id(tensor))
                    self.tensors.append(tensor)
        """Those that the block needs when it runs again, each once: direct arguments, and what passes gradients on."""
        leaves = {**others, **{id(tensor): _Slot(number) for number, tensor in enumerate(self.tensors)}}
        self._copy: Any = _mapped(inputs, lambda tensor: leaves[id(tensor)], {})

    def filled(self, tensors: Sequence[Tensor]) -> Inputs:
        """The arguments as they were, with these tensors in place of `tensors`."""
        inputs: Inputs = _mapped(self._copy, lambda leaf: tensors[leaf] if type(leaf) is _Slot else leaf, {})
        return inputs


def _nodes(tree: Any, *, into_objects: bool = True) -> list[Any]:
    """All that is in a tree, each once."""
    seen, waiting = dict[int, Any](), [tree]
    while waiting:
        node = waiting.pop()
        if type(node) not in _PLAIN and id(node) not in seen:
            seen[id(node)] = node
            if not isinstance(node, Tensor) and (
                into_objects or dataclasses.is_dataclass(node) or not _is_object(node)
            ):
                waiting += reversed(_children(node))
    return [*seen.values()]


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in a tree, inside of objects, too, each once."""
    return [node for node in _nodes(tree) if isinstance(node, Tensor)]


# No function that calls itself from inside: it would keep tensors alive until Python looks for cycles.


def _mapped(node: Any, leaf: Callable[[Any], Any], made: dict[int, Any]) -> Any:
    """A copy of a tree, objects included, with `leaf(tensor)` in place of each tensor and slot."""
    if isinstance(node, (Tensor, _Slot)):
        return leaf(node)
    if type(node) not in _PLAIN and id(node) not in made:
        _copy(node, made, lambda child: _mapped(child, leaf, made))
    return made.get(id(node), node)


def replaced(tree: Any, new: Mapping[int, Tensor]) -> Any:
    """The tree with other tensors in place of some, by id: in the same lists, dicts and objects.

    Example:
        >>> one, two = torch.ones(1), torch.zeros(1)
        >>> written = {"keys": [one]}
        >>> replaced(written, {id(one): two}) is written, written["keys"][0] is two
        (True, True)
    """
    return _replaced(tree, new, {}) if new else tree


def _replaced(node: Any, new: Mapping[int, Tensor], made: dict[int, Any]) -> Any:
    if isinstance(node, Tensor):
        return new.get(id(node), node)
    if type(node) in _PLAIN or id(node) in made:
        return made.get(id(node), node)
    if type(node) is list or type(node) is dict or _is_object(node):
        made[id(node)] = node
        holder: Any = vars(node) if _is_object(node) else node
        for key, value in [*(enumerate(holder) if type(node) is list else holder.items())]:
            other = _replaced(value, new, made)
            if other is not value:
                holder[key] = other
    elif any(id(tensor) in new for tensor in tensors_in(node)):
        return _copy(node, made, lambda child: _replaced(child, new, made))
    return node


def _is_object(value: Any) -> bool:
    """Whether this is an object of the user's that somebody can write to, such as a cache."""
    containers = (Mapping, list, tuple, set, functools.partial)
    if not hasattr(value, "__dict__") or isinstance(value, (*_AS_THEY_ARE, *containers)):
        return False
    return not is_generator(value) and not type(value).__name__.endswith("Config")


def _is_written_to(value: Any) -> bool:
    return _is_object(value) and not dataclasses.is_dataclass(value)  # which are containers


def _children(node: Any) -> list[Any]:
    if isinstance(node, tuple):  # PackedSequence, too
        return list(node)
    if isinstance(node, functools.partial):
        return [*node.args, *node.keywords.values()]
    if _is_object(node):
        return list(vars(node).values())
    return [child for _, _, child in children(node) or ()]


def _copy(node: Any, made: dict[int, Any], copied: Callable[[Any], Any]) -> Any:
    """A container or object of the same kind, with `copied(child)` in place of each child; a leaf itself."""
    new: Any
    if type(node) is list:
        made[id(node)] = new = []
        new.extend([copied(child) for child in node])
    elif type(node) is dict or _is_object(node):
        made[id(node)] = new = {} if type(node) is dict else _another(node)
        own, others = (node, new) if type(node) is dict else (vars(node), vars(new))
        others.update([(key, copied(child)) for key, child in own.items()])
    elif type(node) is set:
        new = set(node)
    elif isinstance(node, PackedSequence):
        new = type(node)(*map(copied, node))
    elif isinstance(node, functools.partial):
        keywords = {key: copied(child) for key, child in node.keywords.items()}
        new = functools.partial(node.func, *map(copied, node.args), **keywords)
    else:
        inside = children(node)
        new = node if inside is None else rebuild(node, [copied(child) for _, _, child in inside])
    made[id(node)] = new
    return new


def _another(value: Any) -> Any:
    """Another of its class."""
    try:
        return object.__new__(type(value))
    except TypeError:  # of a class that is written in C
        return copy.copy(value)


class BlockCall:
    """What it takes to run a block's call again, and the gradients of its outputs as they arrive.

    Its outputs are what it returns and what it writes to its arguments. `given`: as for `Arguments`.
    """

    def __init__(self, block: Block, inputs: Inputs, given: GivenTensors) -> None:
        self.block, self._arguments = block, Arguments(inputs, given)
        self.roots = {place: t for place, t in enumerate(self._arguments.tensors) if t.requires_grad}
        """The tensors among the inputs that pass gradients on, by place, until somebody has numbered them."""
        self._is_first = not self.roots  # no gradient reaches beyond it
        self.keys: dict[int, int] = {}
        """Their numbers, by place."""
        self.start: Conditions | None = None
        self._waiting: list[Waiting] = []
        self._grads: list[Tensor | None] = []  # of its outputs
        self._leaves: dict[int, Tensor] = {}  # where its graph begins, by place among the inputs

    def run(self, inputs: Inputs, start: Conditions, store: Store, held: Collection[int]) -> Any:
        """The outputs, without a graph of the inside. `held`: tensors that the block holds, by id."""
        self.start = start
        given = self._arguments.tensors
        versions = [version_of(tensor) for tensor in given]
        before = {id(tensor): tensor for tensor in tensors_in(inputs)}
        outputs: Any = None
        made: list[Tensor] = []

        def first_pass() -> tuple[list[Tensor], list[Tensor]]:
            nonlocal outputs
            # Where no input wants a gradient, the outputs may not either, as those of a reentrant checkpoint.
            with torch.set_grad_enabled(self._is_first):
                outputs = called(self.block.module, inputs.args, inputs.kwargs)
            start.advance()
            made.extend(_made(outputs, inputs, before))
            self._grads = [None] * len(made)
            # What the module holds, or was called with, gets no graph; and a view could not be edited in place.
            flat = [t.data if t.requires_grad or id(t) in before or id(t) in held else t for t in made]
            passes = [is_floating(tensor) and (tensor.requires_grad or not self._is_first) for tensor in made]
            return flat, [tensor for tensor, passes_on in zip(flat, passes, strict=True) if not passes_on]

        flat = _Boundary.apply(self, first_pass, torch.zeros((), requires_grad=True))
        for tensor, version in zip(given, versions, strict=True):
            if version_of(tensor) != version:
                raise ValueError(self._edits(f" of shape {tuple(tensor.shape)}"))
        new = {id(old): tensor for old, tensor in zip(made, flat, strict=True) if old is not tensor}
        replaced(inputs, {old: tensor for old, tensor in new.items() if old not in before})
        self._waiting = [store.keep(tensor) for tensor in given]
        self._arguments.tensors = []
        return replaced(outputs, new)

    def _edits(self, which: str) -> str:
        return (
            f"The block {self.block.path!r} edits an input{which} in place, so it can't be run again on the same "
            "inputs. Its first operation may have inplace=True; or give it a clone."
        )

    def run_with_graph(self, inputs: Inputs) -> Any:
        """The outputs, with the graph that begins at what it is called with: it won't run again."""
        tensors, self._arguments.tensors = self._arguments.tensors, []
        self._leaves = {place: tensors[place].detach().requires_grad_() for place in self.keys}
        inputs = replaced(inputs, {id(tensors[place]): leaf for place, leaf in self._leaves.items()})
        try:
            return called(self.block.module, inputs.args, inputs.kwargs)
        except RuntimeError as error:
            if "leaf Variable that requires grad is being used in an in-place" not in str(error):
                raise
            raise ValueError(self._edits("")) from error
        finally:  # what it writes goes to the user's own objects
            replaced(inputs, {id(leaf): tensors[place] for place, leaf in self._leaves.items()})

    def prefetch(self) -> None:
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
        assert self.start is not None
        tensors = [waiting.get() for waiting in self._waiting]
        self._leaves = {place: tensors[place].detach().requires_grad_() for place in self.keys}
        inputs = self._arguments.filled([self._leaves.get(place, tensor) for place, tensor in enumerate(tensors)])
        before = {id(tensor): tensor for tensor in tensors_in(inputs)}
        with torch.enable_grad(), self.start.restored():
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


class Reached(BaseException):  # no error, and nothing that a loss would catch
    """The model has come to a block, which is far enough."""

    def __init__(self, place: int, inputs: Inputs) -> None:
        super().__init__()
        self.place, self.inputs = place, inputs


class MicroBatch:
    """A micro-batch's calls of blocks, and the gradients between them."""

    def __init__(self, retake: Callable[[], Batch], forward: Callable[[Batch], Any], start: Conditions) -> None:
        self.retake, self._forward, self.start = retake, forward, start
        self.given: GivenTensors = {}
        self.calls: list[BlockCall | None] = []
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
        raise ValueError(
            f"`blocks` must be called once each, in their order, in the forward pass of every micro-batch. {what} "
            "Leave out of `blocks` what is called otherwise, or list the modules in the order in which they are called."
        )

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
        starts = [call.start for call in self.calls if call is not None and call.start is not None]
        return {generator for start in (self.start, *starts) for generator in start.random.states}

    def pop(self, place: int) -> BlockCall | None:
        """The call of the block at this place, which is no longer kept."""
        call = None
        if place < len(self.calls):
            call, self.calls[place] = self.calls[place], None
        return call

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
        grads = self.first_grads
        with torch.enable_grad(), self.start.restored():
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
