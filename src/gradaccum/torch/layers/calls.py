"""What a micro-batch's forward pass leaves for backward, in which its blocks' calls run again with a graph."""

from __future__ import annotations

import copy
import enum
import functools
import itertools
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.weak import WeakIdKeyDictionary

from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.batch import Batch, children, rebuild
from gradaccum.on_torch.private import graph_of, run_backward
from gradaccum.on_torch.random_state import Conditions, is_generator
from gradaccum.torch.chunking.two_passes import Inputs, backward_roots, is_floating, tensors_of, version_of
from gradaccum.torch.layers.blocks import Block, called
from gradaccum.torch.layers.offload import Store, Waiting

_PLAIN = {str, bool, int, float, type(None), torch.device, torch.dtype, torch.Size}
_CONTAINERS = (Mapping, list, tuple, set, functools.partial)
_AS_THEY_ARE = (nn.Module, type, enum.Enum, types.FunctionType, types.MethodType, types.ModuleType, torch.dtype)


def _is_object(value: Any) -> bool:
    """Whether this is an object of the user's that somebody can write to, such as a cache."""
    if not hasattr(value, "__dict__") or isinstance(value, (Tensor, *_AS_THEY_ARE, *_CONTAINERS)):
        return False
    return not is_generator(value) and not type(value).__name__.endswith("Config")


def _inside(node: Any) -> list[Any] | None:
    """What is in a container or an object; None for a leaf."""
    if type(node) in _PLAIN or isinstance(node, Tensor):
        return None
    if isinstance(node, (tuple, set)):  # PackedSequence, too
        return [*node]
    if isinstance(node, functools.partial):
        return [*node.args, *node.keywords.values()]
    if _is_object(node):
        return [*vars(node).values()]
    inside = children(node)
    return None if inside is None else [child for _, _, child in inside]


def _nodes(tree: Any, *, into_objects: bool = True) -> list[Any]:
    """All that is in a tree, each once; dataclasses count as containers."""
    seen, waiting = dict[int, Any](), [tree]
    while waiting:
        node = waiting.pop()
        if type(node) not in _PLAIN and id(node) not in seen:
            seen[id(node)] = node
            if into_objects or not _is_object(node) or hasattr(node, "__dataclass_fields__"):
                waiting += reversed(_inside(node) or ())
    return [*seen.values()]


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in a tree, inside of objects, too, each once."""
    return [node for node in _nodes(tree) if isinstance(node, Tensor)]


def replaced(tree: Any, new: Mapping[int, Any]) -> Any:
    """The tree with other tensors in place of some, by id: in the same lists, dicts and objects."""
    return _mapped(tree, dict(new), fresh=False) if new else tree


def _mapped(node: Any, new: dict[int, Any], *, fresh: bool) -> Any:
    """A tree with others in place of some nodes, by id; `fresh`: in copies of all containers and objects."""
    if id(node) in new or (inside := _inside(node)) is None:
        return new.get(id(node), node)
    mapped = node
    if type(node) in (list, dict) or _is_object(node):  # which may be inside of themselves
        if fresh:
            mapped = type(node)() if type(node) in (list, dict) else _another(node)
        new[id(node)] = mapped
        if type(node) is list:
            mapped[:] = [_mapped(child, new, fresh=fresh) for child in inside]
        else:
            attributes, target = (node, mapped) if type(node) is dict else (vars(node), vars(mapped))
            target.update({key: _mapped(child, new, fresh=fresh) for key, child in attributes.items()})
    elif not isinstance(node, set):
        values = [_mapped(child, new, fresh=fresh) for child in inside]
        if fresh or not all(map(is_, values, inside)):
            mapped = _with_values(node, values)
    elif fresh:
        mapped = set(node)
    new[id(node)] = mapped
    return mapped


def _with_values(node: Any, values: list[Any]) -> Any:
    if isinstance(node, PackedSequence):
        return type(node)(*values)
    if isinstance(node, functools.partial):
        count = len(node.args)
        return functools.partial(node.func, *values[:count], **dict(zip(node.keywords, values[count:], strict=True)))
    return rebuild(node, values)


def _another(value: Any) -> Any:
    """Another of its class."""
    try:
        return object.__new__(type(value))
    except TypeError:  # of a class that is written in C
        return copy.copy(value)


class Arguments:
    """The arguments of a block's call, as they are before it: a block that runs again must find them so.

    In a copy of the containers and objects each tensor is a slot, so that nobody holds it twice. What earlier blocks
    have `written` to objects is there as a shape: a cache of all blocks' keys would take the memory of all blocks.
    """

    def __init__(self, inputs: Inputs, written: Mapping[Tensor, Any]) -> None:
        self.tensors = [node for node in _nodes(inputs, into_objects=False) if isinstance(node, Tensor)]
        """Those that the block needs when it runs again: direct arguments, and what passes gradients on."""
        direct, new = set(map(id, self.tensors)), dict[int, Any]()
        for tensor in tensors_in(inputs):
            if id(tensor) not in direct and tensor in written:
                new[id(tensor)] = torch.empty_like(tensor, device="meta", requires_grad=False)
            elif id(tensor) not in direct and tensor.requires_grad:
                self.tensors.append(tensor)
        self._slots = [object() for _ in self.tensors]
        new.update({id(tensor): slot for tensor, slot in zip(self.tensors, self._slots, strict=True)})
        self._copy: Inputs = _mapped(inputs, new, fresh=True)

    def filled(self, tensors: Sequence[Tensor]) -> Inputs:
        """The arguments as they were, with these tensors in place of `tensors`. Once."""
        inputs: Inputs = replaced(self._copy, {id(s): tensor for s, tensor in zip(self._slots, tensors, strict=True)})
        return inputs


class BlockCall:
    """What it takes to run a block's call again, and the gradients of its outputs as they arrive.

    Its outputs are the tensors that it returns, and those that it writes to its arguments.
    """

    def __init__(self, block: Block, inputs: Inputs, written: Mapping[Tensor, Any]) -> None:
        self.block, self._arguments = block, Arguments(inputs, written)
        self.roots = {place: t for place, t in enumerate(self._arguments.tensors) if t.requires_grad}
        """The tensors among the inputs that pass gradients on, by place, until somebody has numbered them."""
        self._is_first = not self.roots  # no gradient reaches beyond it
        self.keys: dict[int, int] = {}
        """Their numbers, by place."""
        self.start: Conditions | None = None
        self._waiting: list[Waiting] = []
        self._grads: list[Tensor | None] = []  # of its outputs
        self._leaves: dict[int, Tensor] = {}  # where its graph begins, by place among the inputs

    def run(self, inputs: Inputs, start: Conditions, store: Store, in_module: Collection[int], written: Any) -> Any:
        """The outputs, without a graph of the inside. `in_module`: tensors that the block holds, by id."""
        self.start, arguments = start, self._arguments.tensors
        versions, in_inputs = [*map(version_of, arguments)], set(map(id, tensors_in(inputs)))
        # Where no input wants a gradient, the outputs may not either, as those of a reentrant checkpoint.
        with torch.set_grad_enabled(self._is_first):
            outputs = called(self.block.module, inputs.args, inputs.kwargs)
        start.advance()
        for tensor, version in zip(arguments, versions, strict=True):
            if version_of(tensor) != version:
                raise ValueError(self._edits(f" of shape {tuple(tensor.shape)}"))
        made = _made(outputs, inputs, in_inputs)
        self._grads = [None] * len(made)
        # What the module holds, or was called with, gets no graph; and a view could not be edited in place.
        without_graph = in_inputs.union(in_module)
        flat = [tensor.data if tensor.requires_grad or id(tensor) in without_graph else tensor for tensor in made]
        passes = [is_floating(tensor) and (tensor.requires_grad or not self._is_first) for tensor in made]
        constant = [tensor for tensor, passes_on in zip(flat, passes, strict=True) if not passes_on]
        graphed = _Boundary.apply(self, flat, constant, torch.zeros((), requires_grad=True))
        new = {id(old): tensor for old, tensor in zip(made, graphed, strict=True) if old is not tensor}
        outputs = replaced(outputs, new)
        inputs = replaced(inputs, {old: tensor for old, tensor in new.items() if old not in in_inputs})
        returned = in_inputs.union(map(id, tensors_of(outputs)))
        written.update({tensor: None for tensor in tensors_in(inputs) if id(tensor) not in returned})
        self._waiting, self._arguments.tensors = [store.keep(tensor) for tensor in arguments], []
        return outputs

    def _edits(self, which: str) -> str:
        return (
            f"The block {self.block.path!r} edits an input{which} in place, so it can't be run again on the same "
            "inputs. Its first operation may have inplace=True. Turn that off, or give the block a clone."
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
                so_far = self._grads[place]
                self._grads[place] = grad if so_far is None else so_far + grad

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
        in_inputs = set(map(id, tensors_in(inputs)))
        with torch.enable_grad(), self.start.restored():
            outputs = called(self.block.module, inputs.args, inputs.kwargs)
        made = _made(outputs, inputs, in_inputs)
        if len(made) != len(self._grads):
            raise NotEquivalentError(
                f"The block {self.block.path!r} returned {len(self._grads)} tensors in the forward pass, and "
                f"{len(made)} when backward ran it again. Its outputs must depend only on its inputs."
            )
        roots, gradients = backward_roots(made, self._grads)
        del inputs, outputs, made, tensors
        if roots:
            run_backward(roots, gradients)
        return self.arrived()

    def arrived(self) -> dict[int, Tensor]:
        """The graph has gone backward. Returns the gradients of what was in `roots`, by place, and drops it."""
        leaves, self._leaves = self._leaves, {}
        return {place: leaf.grad for place, leaf in leaves.items() if leaf.grad is not None}


def _made(outputs: Any, inputs: Inputs, before: Collection[int]) -> list[Tensor]:
    """The tensors that a call has returned, or put into its arguments. In objects, those from before don't count."""
    returned = {id(tensor) for tensor in tensors_of(outputs)}
    return [tensor for tensor in tensors_in((outputs, inputs)) if id(tensor) in returned or id(tensor) not in before]


class _Boundary(torch.autograd.Function):
    """Where a micro-batch's graph ends, to go on when it is the block's turn."""

    @staticmethod
    def forward(ctx: Any, call: BlockCall, made: list[Tensor], constant: list[Tensor], _: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        if torch.is_autocast_cache_enabled():  # copies made without a graph would hide tied weights from a loss
            torch.clear_autocast_cache()
        ctx.mark_non_differentiable(*constant)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.call.arrive(grads)
        return None, None, None, None


class Reached(BaseException):  # no error, and nothing that a loss would catch
    """The model has come to a block, which is far enough."""

    def __init__(self, place: int, inputs: Inputs) -> None:
        super().__init__()
        self.place, self.inputs = place, inputs


class MicroBatch:
    """A micro-batch's calls of blocks, and the gradients between them."""

    def __init__(self, retake: Callable[[], Batch], forward: Callable[[Batch], Any], start: Conditions) -> None:
        self.retake, self._forward, self.start = retake, forward, start
        self.written: Any = WeakIdKeyDictionary()
        """The tensors that blocks have put into their arguments."""
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
            "Each of `blocks` must be called once in every forward pass, in the order of the list. "
            f"{what} Leave out of `blocks` what is called otherwise, or list the modules in the order of their calls."
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

    def arrive(self, place: int, call: BlockCall, gradients: dict[int, Tensor]) -> None:
        """The inputs of the block at this place have gradients: pass on those that no block before it waits for."""
        for index, grad in gradients.items():
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
                f"The block {first!r} was called with other inputs when backward ran the model up to there again. Does "
                "the loss take something from an iterator, or count its calls? Pass that in the batch."
            )
        pairs = [(tensors[index], grad) for index, grad in grads.items() if tensors[index].requires_grad]
        return [root for root, _ in pairs], [grad for _, grad in pairs]


def _ends(node: Any) -> bool:
    """Whether a graph ends here, with nothing that a backward pass frees."""
    return hasattr(node, "variable") or isinstance(getattr(node, "call", None), BlockCall)
