"""Any loss on the outputs of the large batch, in the memory of a micro-batch.

first pass      outputs of all micro-batches, without keeping activations
the loss        on the whole batch's outputs, whatever it looks across
second pass     backward recomputes micro-batch by micro-batch, given the gradient of the outputs
"""

from __future__ import annotations

import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradaccum.core.sizes import TokenBudget, even_sizes
from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.batch import BatchDims, concatenate, described, map_leaves, number_of_rows, take
from gradaccum.schedule import checked_count
from gradaccum.torch.batch_norm import BatchNormChoice, BatchNormPolicy, batch_norms, check_plain, ranks_of
from gradaccum.torch.chunking.exact_batch_norm import run_exact
from gradaccum.torch.chunking.proof import ROWS, prove, proving
from gradaccum.torch.chunking.two_passes import (
    Inputs,
    Passes,
    check_nothing_cached,
    dims_by_name,
    is_flat,
    tensors_of,
)
from gradaccum.torch.module_state import ModuleContents
from gradaccum.torch.padding import Left, Packs, can_take_positions

logger = logging.getLogger("gradaccum")


class _Plan(NamedTuple):
    """How one call is cut into micro-batches."""

    inputs: Inputs
    dims: BatchDims
    rows: int
    sizes: list[int]
    packs: Packs | None
    is_exact: bool
    spans_ranks: bool
    """Whether the ranks of a SyncBatchNorm exchange statistics: in one way, also where one has a single micro-batch."""

    def micro_batches(self) -> list[Inputs]:
        """What the module is called with for each micro-batch: views of the inputs' rows."""
        ends = itertools.accumulate(self.sizes)
        rows = [slice(end - size, end) for size, end in zip(self.sizes, ends)]
        cut = [self._cut(path, leaf, dim, rows) for path, leaf, dim in described(self.inputs, self.dims)]
        if is_flat(self.inputs):
            parts = [Inputs(inputs, {}) for inputs in zip(*cut, strict=True)]
        else:
            remaining = [iter(leaves) for leaves in zip(*cut, strict=True)]
            parts = [map_leaves(lambda _, of_part=of_part: next(of_part), self.inputs) for of_part in remaining]
        return parts if self.packs is None else [self.packs.trimmed(part, n) for n, part in enumerate(parts)]

    def _cut(self, path: str, leaf: Any, dim: int | None, rows: list[slice]) -> Sequence[Any]:
        if dim is None:
            return [leaf] * len(rows)
        if not isinstance(leaf, Tensor):  # an array
            leaf = leaf if self.packs is None else take(leaf, self.packs.order, dim)
            return [take(leaf, of_part, dim) for of_part in rows]
        if leaf.is_nested or leaf.layout is not torch.strided:
            kind = "a nested tensor" if leaf.is_nested else f"of layout {leaf.layout}"
            raise ValueError(
                f"{path.removeprefix('.')} is {kind}, which can't be sliced into rows. Pass a dense, padded tensor, or "
                "None for it in `batch_dims` if all micro-batches share it."
            )
        leaf = leaf if self.packs is None else leaf.index_select(dim, self.packs.order.to(leaf.device))
        return leaf.split(self.sizes, dim)


class ColumnsError(ValueError):
    """Outputs for each token, where micro-batches have columns of their own."""


def _check_rows(
    path: str, output: Tensor, dim: int | None, rows: int, shapes: dict[str, tuple[int, ...]] | None
) -> None:
    """Raise a ValueError if an output isn't one per row; with `shapes`, those of rows of earlier micro-batches."""
    if dim is None or output.shape[dim] != rows:
        where = "no dimension" if dim is None else f"dimension {dim}"
        raise ValueError(
            f"Outputs must have a row for every row of the inputs. Received: output{path} of shape "
            f"{tuple(output.shape)} for {rows} rows, looked for in {where}. Return one value per row and reduce over "
            "them outside, or name the dimension in `out_dims`."
        )
    shape = (*output.shape[:dim], *output.shape[dim + 1 :])
    if shapes is not None and shapes.setdefault(path, shape) != shape:
        raise ColumnsError(
            "With `max_tokens` the columns differ between micro-batches, so outputs must have none: pool over tokens "
            f"in the chunked module. Received: rows of output{path} of shapes {shapes[path]} and {shape}."
        )


class Chunked(nn.Module):
    """A module with the same outputs and gradients that keeps the activations of one micro-batch at a time.

    The forward pass runs in micro-batches and keeps only their outputs; backward runs each of them again, which costs
    one more forward pass. Any loss on the outputs gets the large batch's gradient exactly:

        dL/dp = sum_i (dL/d out_i) (d out_i/dp)        over micro-batches i, with dL/d out from the whole batch's loss

    Its parameters, attributes and `state_dict` keys are those of `module`.

    Args:
        module: Its outputs must have a row for every row of its inputs, and a row's output must depend on that row
            only; `verify` checks this.
        micro_batch_size: The largest number of rows in a micro-batch.
        max_tokens: The largest number of padded tokens in a micro-batch: rows with an attention mask are sorted by
            length, trimmed to the longest row of their micro-batch, and packed. Outputs keep the rows' order.
        keep: How many micro-batches keep their activations and are not recomputed; with `max_tokens` those of the
            shortest rows.
        batch_dims: The dimension that holds the rows, like `torch.vmap`'s `in_dims` over the positional arguments, or a
            dict by argument name; None for tensors that all micro-batches share.
        out_dims: The same for the outputs; default: `batch_dims` if that is an int, else 0.
        batch_norm: What to do about BatchNorm: `"warn"` and `"pooled"` move the running statistics once per forward
            pass, `"micro"` once per micro-batch, `"frozen"` never; `"exact"` normalises with the large batch's
            statistics.
        offload: With `batch_norm="exact"`, keep tensors that cross the BatchNorm layers in host memory.
        verify: Compare 8 rows at once with the same rows in micro-batches: outputs, gradients, and what the module
            keeps. This is done at the first call that needs gradients, and again when modules are in another mode.
            BatchNorm that isn't exact is left out. A warning says so where the rows can't be compared.

    Raises:
        TypeError, ValueError: An argument is invalid.
        NotEquivalentError: At the first call, from `verify`: a layer looks across rows, or a tensor with a graph leaves
            the module outside its outputs. The message names it.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> encoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> small = chunked(encoder, 32)
        >>> logits = small(torch.randn(256, 4)) @ small(torch.randn(256, 4)).T       # 256 x 256: looks across rows
        >>> nn.functional.cross_entropy(logits, torch.arange(256)).backward()
        >>> list(small.state_dict())
        ['0.weight', '0.bias', '2.weight', '2.bias']
    """

    module: nn.Module
    max_tokens: int | None = None
    _left: Left = "cut"
    """What happens to padding."""
    _calls = 0
    """Those that went forward with gradients."""
    _proven: frozenset[Any] | None = None
    """The modes of modules, and the sides with padding, in which a call has proven itself; None where none is to."""

    def __init__(
        self,
        module: nn.Module,
        micro_batch_size: int,
        *,
        max_tokens: int | None = None,
        keep: int = 0,
        batch_dims: BatchDims = 0,
        out_dims: BatchDims | None = None,
        batch_norm: BatchNormChoice = "warn",
        offload: bool = False,
        verify: bool = True,
    ) -> None:
        policy = BatchNormPolicy(
            batch_norm,
            _checked_module(module),
            moved_once=True,
            remedy='Use batch_norm="exact", or GroupNorm; if it is intended, "pooled", "micro" or "frozen".',
        )
        if offload and batch_norm != "exact":
            raise ValueError(
                '`offload` moves what crosses BatchNorm layers to host memory, so it needs batch_norm="exact". '
                f"Received: offload={offload!r}, batch_norm={batch_norm!r}."
            )
        if max_tokens is not None and batch_norm == "exact":
            raise ValueError(
                '`max_tokens` cuts off padding, which the statistics of batch_norm="exact" include. Leave one out.'
            )
        training = module.training
        super().__init__()
        self.__dict__["module"] = module  # not as a submodule, which would prefix every key
        for shared in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
            self.__dict__[shared] = module.__dict__[shared]
        self.training = training
        self.policy = policy
        self.micro_batch_size = checked_count(micro_batch_size, "micro_batch_size")
        self.max_tokens = None if max_tokens is None else checked_count(max_tokens, "max_tokens")
        self._left = "whole" if verify else "cut"  # until it is proven that it can be cut off
        self.keep, self.offload = checked_count(keep, "keep", least=0), offload
        self.batch_dims = batch_dims
        self._proven = frozenset() if verify else None
        self.out_dims = out_dims if out_dims is not None else batch_dims if isinstance(batch_dims, int) else 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the two passes are no graph; compile the module inside instead
            return torch._dynamo.disable(self._forward)(*args, **kwargs)
        return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if proving():  # inside of another one, which looks at a few rows
            return self.module(*args, **kwargs)
        plan = self._plan(self._inputs(args, kwargs), self._left)
        pads = plan.packs is not None and bool(plan.packs.padded)
        if len(plan.sizes) == 1 and not (plan.spans_ranks or pads):
            with self.policy.recomputation():
                return self.module(*args, **kwargs)
        check_nothing_cached()
        state = ModuleContents(self.module)
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in state.parameters):
            raise ValueError("`module` has lazy parameters without a shape yet: call it on a few rows first.")
        every = (*state.parameters, *tensors_of(plan.inputs))
        differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in every)
        if differentiated and torch._C._functorch.maybe_current_level() is not None:
            raise NotImplementedError(
                f"A chunked {type(self.module).__name__} is called inside of a transform of torch.func (grad, vmap, "
                "jvp ...), which its two passes don't support. Use backward() or torch.autograd.grad, or transform "
                "the module inside."
            )
        compares = False
        if self._proven is not None:
            plan, compares = self._proven_plan(plan, frozenset(state.modes()), differentiated)
        with self.policy.window(looks=compares):
            return self._run(plan, self.policy, state, self.keep, differentiated=differentiated, compares=compares)

    def _proven_plan(self, plan: _Plan, modes: frozenset[Any], differentiated: bool) -> tuple[_Plan, bool]:
        """The plan, once calls in these modes have proven themselves, and whether second passes are compared."""
        assert self._proven is not None
        packs = plan.packs
        if packs is not None:
            modes |= packs.padded | {packs.text}
        new = not modes <= self._proven
        if new and packs is not None and plan.rows < 2:  # nothing to compare it with: padding stays
            plan = self._plan(plan.inputs, "whole")
        elif new and (differentiated or packs is not None):
            before = self._left
            self._prove(plan)
            # What was proven for another treatment of padding on the left is to be proven anew.
            self._proven = self._proven | modes if self._left == before else modes
            plan = plan if packs is None else self._plan(plan.inputs, self._left)
        self._calls += differentiated
        return plan, new or not self._calls & (self._calls - 1)  # in calls 1, 2, 4, 8, ..., and in new modes

    def _run(self, plan: _Plan, policy: BatchNormPolicy, state: ModuleContents, keep: int, **how: bool) -> Any:
        parts: list[Any] = plan.micro_batches()
        if plan.is_exact:
            parts = run_exact(self.module, policy, parts, plan.sizes, keep, offload=self.offload, **how)
        else:
            parts = Passes(self.module, policy, parts[0], plan.sizes, state=state).run(parts, keep, **how)
        shapes: dict[str, tuple[int, ...]] = {}
        for outputs, rows in zip(parts, plan.sizes, strict=True):
            for path, leaf, dim in described(outputs, self.out_dims):
                if isinstance(leaf, Tensor):
                    _check_rows(path, leaf, dim, rows, None if plan.packs is None else shapes)
        joined = concatenate(parts, self.out_dims)
        return joined if plan.packs is None else take(joined, plan.packs.back, self.out_dims)

    def _plan(self, inputs: Inputs, left: Left, sizes: list[int] | None = None) -> _Plan:
        """How a call is cut; `sizes` are those of a proof's micro-batches."""
        dims = dims_by_name(self.batch_dims, inputs, self.module)
        rows = number_of_rows(inputs, dims)
        packs = None
        if self.max_tokens is not None and (sizes is None or left != "whole"):
            packs = Packs(inputs, TokenBudget(self.max_tokens, self.micro_batch_size), left, sizes)
            sizes = packs.sizes
        _check_not_sharded_inside(self.module)
        norms = [layer for _, layer in batch_norms(self.module)] if self.policy.choice == "exact" else []
        if norms:
            check_plain(self.module)
        spans_ranks = any(ranks_of(layer) > 1 for layer in norms)
        return _Plan(
            inputs, dims, rows, sizes or even_sizes(rows, self.micro_batch_size), packs, bool(norms), spans_ranks
        )

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """The arguments; by name where the attention mask, which packs are made of, was given by its position."""
        if self.max_tokens is not None:
            every = inspect.signature(self.module.forward).parameters.values()
            names = [p.name for p in every if p.kind is p.POSITIONAL_OR_KEYWORD][: len(args)]
            if "attention_mask" in names and len(names) == len(args):
                return Inputs((), {**dict(zip(names, args, strict=True)), **kwargs})
        return Inputs(args, kwargs)

    def _prove(self, plan: _Plan) -> None:
        """The first call in these modes: prove it, or say why it can't be proven."""
        name = type(self.module).__name__
        if plan.spans_ranks:
            logger.warning(
                "Whether a chunked %s gives the outputs and gradients of all rows at once is not proven here: the "
                "ranks of its SyncBatchNorm wait for each other in every pass. Call verify() on one process.",
                name,
            )
            return
        try:
            with torch.inference_mode(False):
                self._compare(plan, neutral=self.policy.choice != "exact")
        except NotEquivalentError as error:
            raise NotEquivalentError(
                f"{error}\nFound on a few rows, before the call was made. verify=False leaves this proof out."
            ) from None
        except ColumnsError:
            raise
        except Exception as error:
            self._left = "whole"
            logger.warning(
                "Whether a chunked %s gives the outputs and gradients of all rows at once could not be proven: a few "
                "of these rows can't be evaluated by themselves (%s: %s).%s",
                name,
                type(error).__name__,
                str(error).strip().partition("\n")[0],
                "" if plan.packs is None else " Padding is not cut off.",
            )

    def _compare(self, plan: _Plan, *, neutral: bool) -> None:
        """A few rows at once and in micro-batches. Of packed rows, it finds out how padding on the left can be cut off.

        `neutral`: BatchNorm normalises as in eval mode, as something else is said of it.
        """
        if plan.packs is None:
            prove(self.module, self._rehearsed("whole"), plan.inputs, plan.dims, exact=plan.is_exact, neutral=neutral)
            return
        ordered = take(plan.inputs, plan.packs.informative_rows(ROWS), plan.dims)
        now: Left = "keep" if self._left == "whole" else self._left
        ways: list[Left] = ["cut", "number", "keep"] if "left" in plan.packs.padded else [now]
        for way in ways:
            if way != "number" or can_take_positions(plan.inputs, self.module):
                try:
                    prove(self.module, self._rehearsed(way), ordered, plan.dims, neutral=neutral, trims=True)
                except NotEquivalentError as error:
                    wrong = error
                else:
                    self._left = way
                    return
        prove(
            self.module, self._rehearsed("whole"), ordered, plan.dims, neutral=neutral
        )  # do rows depend on each other?
        raise NotEquivalentError(
            "Cutting off columns of nothing but padding changes the outputs or their gradients: padded positions count "
            "in them, in pooling say, or the model looks at them in spite of the mask. Apply the attention mask there, "
            f"or leave out `max_tokens`.\n{wrong}"
        )

    def _rehearsed(self, left: Left) -> Callable[[Inputs, list[int]], Any]:
        """A call in micro-batches of given sizes, as proofs make it, in which padding is treated so."""

        def run(few: Inputs, sizes: list[int]) -> Any:
            plan = self._plan(few, left, sizes)
            policy = BatchNormPolicy("exact" if plan.is_exact else "micro", self.module)
            return self._run(plan, policy, ModuleContents(self.module), 0, differentiated=True, compares=True)

        return run

    def verify(self, *args: Any, **kwargs: Any) -> None:
        """Compare a few rows of these inputs at once with the same rows in micro-batches, as the first call does.

        Raises:
            NotEquivalentError: Outputs or gradients differ; the message names the first layer whose outputs depend on
                other rows, or the tensor that leaves the module outside its outputs.
            ValueError: The rows can't be compared; the message says why.

        Example:
            >>> chunked(nn.Linear(4, 2), 32).verify(torch.randn(256, 4))
        """
        plan = self._plan(self._inputs(args, kwargs), self._left)
        self._compare(plan, neutral=self.policy.choice == "frozen")

    # The module's own, in every respect but `forward`.

    @property
    def training(self) -> bool:
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in self.__dict__:
            self.module.training = mode

    def train(self, mode: bool = True) -> Chunked:
        self.module.train(mode)
        return self

    def apply(self, fn: Any) -> Chunked:
        self.module.apply(fn)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Chunked:
        self.module._apply(fn, recurse)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.module._load_from_state_dict(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in _OWN or name.startswith("_") or isinstance(getattr(type(self), name, None), property)
        if own or "module" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # not there yet, as while unpickling
            raise AttributeError(name)
        return getattr(self.module, name)

    # Python looks these up on the class.

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]  # the module's own error, if it has none

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)  # type: ignore[call-overload]

    def __bool__(self) -> bool:  # without it, by `__len__`
        return bool(self.module)

    def extra_repr(self) -> str:
        return f"{type(self.module).__name__}, micro_batch_size={self.micro_batch_size}"


def _checked_module(module: Any) -> nn.Module:
    """A module that can be run again, in micro-batches."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"`module` must be a torch.nn.Module, so that its parameters are known. "
            f"Received: {module!r} of type {type(module).__name__}."
        )
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "`module` is a DistributedDataParallel, which expects one forward pass per backward pass. Chunk what "
            "it wraps: DistributedDataParallel(chunked(encoder, ...))."
        )
    for path, layer in module.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            raise ValueError(
                f"{path or 'The module'!r} is a TorchScript module, whose parameters can't be replaced. Chunk the "
                "module that it was made of."
            )
    return module


def _check_not_sharded_inside(module: nn.Module) -> None:
    """Raise a ValueError if `fully_shard` was called on a part of the module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for path, layer in module.named_modules() if fsdp is not None else ():
        if isinstance(layer, fsdp.FSDPModule):  # type: ignore[union-attr]  # not None here
            raise ValueError(
                f"{path or 'The module'!r} inside a chunked module is sharded by fully_shard, which would reduce the "
                "gradients of each micro-batch by itself. Shard around it: fully_shard(chunked(encoder, ...))."
            )


_OWN = {*vars(nn.Module()), "module", "policy", "micro_batch_size", "max_tokens", "keep", "offload", "batch_dims",
        "out_dims"}  # fmt: skip
"""Attributes of a `Chunked` itself; all others are those of its module."""

Chunked.__module__ = "gradaccum.torch.chunked"  # where pickles look for it, wherever it lives
chunked = Chunked
