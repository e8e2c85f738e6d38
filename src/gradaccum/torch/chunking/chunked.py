"""Any loss on the outputs of the large batch, in the memory of a micro-batch.

first pass      outputs of all micro-batches, without keeping activations
the loss        on the whole batch's outputs, whatever it looks across
second pass     backward recomputes micro-batch by micro-batch, given the gradient of the outputs
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from gradaccum.core.sizes import TokenBudget, even_sizes
from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.batch import BatchDims, number_of_rows, take
from gradaccum.schedule import checked_count
from gradaccum.torch.batch_norm import (
    BatchNormChoice,
    BatchNormPolicy,
    batch_norms,
    check_plain,
    ranks_of,
    warn_of_functional_batch_norm,
)
from gradaccum.torch.chunking.exact_batch_norm import ExactCall
from gradaccum.torch.chunking.proof import ROWS, Findings, prove, proving
from gradaccum.torch.chunking.two_passes import (
    Call,
    ColumnsError,
    Inputs,
    check_nothing_cached,
    dims_by_name,
    tensors_of,
)
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


class Chunked(nn.Module):
    """A module with the same outputs and gradients that keeps the activations of one micro-batch at a time.

    The forward pass runs in micro-batches and keeps only their outputs; backward runs each of them again. This costs
    one more forward pass, and any loss on the outputs gets the large batch's gradient exactly:

        dL/dp = sum_i (dL/d out_i) (d out_i/dp)        over micro-batches i, with dL/d out from the whole batch's loss

    Its parameters, attributes and `state_dict` keys are those of `module`.

    Args:
        module: Its outputs must have a row for every row of its inputs, and a row's output must depend on that row
            only; `verify` checks that.
        micro_batch_size: Rows whose activations fit, at most.
        max_tokens: Padded tokens of a micro-batch: rows with an attention mask are sorted by length, trimmed to the
            longest of their micro-batch and packed. Outputs come in the rows' order.
        keep: Micro-batches that keep their activations and are not recomputed; with `max_tokens` the shortest rows'.
        batch_dims: The dimension that holds the rows, like `torch.vmap`'s `in_dims` over the positional arguments, or a
            dict by argument name; None for tensors that all micro-batches share.
        out_dims: The same for the outputs; default: `batch_dims` if that is an int, else 0.
        batch_norm: What to do about BatchNorm: `"warn"` and `"pooled"` move the running statistics once per forward
            pass, `"micro"` once per micro-batch, `"frozen"` never; `"exact"` normalises with the large batch's
            statistics.
        offload: With `batch_norm="exact"`, keep tensors that cross the BatchNorm layers in host memory.
        verify: Prove at the first call that needs gradients, and again in another mode of a module, that a few of its
            rows have the same outputs and gradients in micro-batches as at once. BatchNorm that isn't exact is left
            out; a warning names what can't be evaluated.

    Raises:
        TypeError, ValueError: An argument is invalid.
        NotEquivalentError: At the first call, from `verify`. The message names the part that looks across rows, or the
            tensor that leaves the module besides its outputs.

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
            remedy='Use batch_norm="exact", or GroupNorm; "pooled", "micro" or "frozen" say that it is meant.',
        )
        if batch_norm == "exact" and keep:
            raise ValueError(
                f'batch_norm="exact" recomputes every micro-batch. Received: keep={keep!r} with it; leave it at 0.'
            )
        if offload and batch_norm != "exact":
            raise ValueError(
                '`offload` keeps what crosses BatchNorm layers in host memory, which batch_norm="exact" alone does. '
                f"Received: offload={offload!r}, batch_norm={batch_norm!r}."
            )
        if max_tokens is not None and batch_norm == "exact":
            raise ValueError('batch_norm="exact" needs the whole batch as it is padded. Leave out `max_tokens`.')
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
        call, tensors = self._call(plan, self.policy), tensors_of(plan.inputs)
        check_nothing_cached()
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in call.state.parameters):
            raise ValueError("`module` has lazy parameters without a shape yet: call it on a few rows first.")
        differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in (*call.state.parameters, *tensors))
        if differentiated and torch._C._functorch.maybe_current_level() is not None:
            raise NotImplementedError(
                f"A chunked {type(self.module).__name__} is called inside of a transform of torch.func (grad, vmap, "
                "jvp ...), and its two passes are torch.autograd's. Use backward() or torch.autograd.grad, or "
                "transform the module inside."
            )
        if self._proven is not None:
            call = self._proven_call(plan, call, self._proven, differentiated)
        with self.policy.window():
            return call.run(tensors, self.keep, differentiated=differentiated)

    def _proven_call(self, plan: _Plan, call: Call, proven: frozenset[Any], differentiated: bool) -> Call:
        """The call, once one in these modes has proven itself; padding is treated as the proof has found right."""
        modes = frozenset(call.state.modes()) | (
            plan.packs.padded | plan.packs.text if plan.packs is not None else set()
        )
        new = not modes <= proven
        if new and plan.packs is not None and plan.rows < 2:  # nothing to compare it with: padding stays
            call = self._call(self._plan(plan.inputs, "whole"), self.policy)
        elif new and (differentiated or plan.packs is not None):
            self._prove(plan)
            self._proven = proven | modes
            if plan.packs is not None:
                call = self._call(self._plan(plan.inputs, self._left), self.policy)
        self._calls += differentiated
        # Second passes are compared in calls 1, 2, 4, 8, ..., and in new modes.
        call.first_outputs = {} if new or not self._calls & (self._calls - 1) else None
        return call

    def _plan(self, inputs: Inputs, left: Left) -> _Plan:
        """How a call is cut."""
        dims = dims_by_name(self.batch_dims, inputs, self.module)
        rows = number_of_rows(inputs, dims)
        packs = None if self.max_tokens is None else self._packs(inputs, left)
        _check_not_sharded_inside(self.module)
        norms = [layer for _, layer in batch_norms(self.module)] if self.policy.choice == "exact" else []
        if norms:
            check_plain(self.module)
        sizes = even_sizes(rows, self.micro_batch_size) if packs is None else packs.sizes
        return _Plan(inputs, dims, rows, sizes, packs, bool(norms), any(ranks_of(layer) > 1 for layer in norms))

    def _call(self, plan: _Plan, policy: BatchNormPolicy) -> Call:
        given = self.module, policy, plan.inputs, plan.dims, self.out_dims, plan.sizes
        return ExactCall(*given, offload=self.offload) if plan.is_exact else Call(*given, plan.packs)

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """The arguments; by name where the attention mask, which packs are made of, was given by its position."""
        if self.max_tokens is not None:
            every = inspect.signature(self.module.forward).parameters.values()
            names = [p.name for p in every if p.kind is p.POSITIONAL_OR_KEYWORD][: len(args)]
            if "attention_mask" in names and len(names) == len(args):
                return Inputs((), {**dict(zip(names, args, strict=True)), **kwargs})
        return Inputs(args, kwargs)

    def _packs(self, inputs: Inputs, left: Left, sizes: list[int] | None = None) -> Packs:
        assert self.max_tokens is not None
        return Packs(inputs, TokenBudget(self.max_tokens, self.micro_batch_size), left, sizes)

    def _prove(self, plan: _Plan) -> None:
        """The first call in these modes: prove it, or say why it can't be proven."""
        name = type(self.module).__name__
        if plan.spans_ranks:
            logger.warning(
                "Whether a chunked %s gives the outputs and gradients of all rows at once is not proven here: the "
                "ranks of its SyncBatchNorm wait for each other in every pass. Prove it on one process.",
                name,
            )
            return
        try:
            with torch.inference_mode(False):
                found = self._findings(plan, batch_norm=self.policy.choice == "exact")
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
                "of these rows can't be evaluated so (%s: %s).%s",
                name,
                type(error).__name__,
                str(error).strip().partition("\n")[0],
                "" if plan.packs is None else " Padding is not cut off.",
            )
            return
        if found.functional and self.policy.choice in ("pooled", "frozen"):
            raise NotEquivalentError(
                f"batch_norm={self.policy.choice!r} has no hold of torch.nn.functional.batch_norm, which is called "
                f"in {', '.join(map(repr, found.functional))} of a chunked {name}. Use nn.BatchNorm or GroupNorm."
            )
        if found.functional and self.policy.choice == "warn":
            warn_of_functional_batch_norm(self.module, found.functional, "Use GroupNorm there.")
        for remark in found.remarks:
            logger.warning(remark)

    def _findings(self, plan: _Plan, *, batch_norm: bool) -> Findings:
        """What the proof finds. Of packed rows, it finds out how padding on the left can be cut off."""
        if plan.packs is None:
            return self._compared(plan, plan.inputs, batch_norm=batch_norm)
        ordered = take(plan.inputs, plan.packs.telling(ROWS), plan.dims)
        now: Left = "keep" if self._left == "whole" else self._left
        ways: list[Left] = ["cut", "number", "keep"] if "left" in plan.packs.padded else [now]
        for way in ways:
            if way != "number" or can_take_positions(plan.inputs, self.module):
                try:
                    found = self._compared(plan, ordered, batch_norm=batch_norm, left=way)
                except NotEquivalentError as error:
                    wrong = error
                else:
                    self._left = way
                    return found
        self._compared(plan, ordered, batch_norm=batch_norm)  # raises, if rows depend on each other
        raise NotEquivalentError(
            "Cutting off columns of nothing but padding changes the outputs or their gradients. Either padded "
            f"positions count in them: leave them out by the attention mask, where tokens are pooled, say. Or the "
            f"model looks at them in spite of the mask. Leave out `max_tokens`, or fix that.\n{wrong}"
        )

    def _compared(self, plan: _Plan, inputs: Inputs, *, batch_norm: bool, left: Left | None = None) -> Findings:
        """A few of these rows at once and in micro-batches; with `left`, packed ones, whose padding is treated so."""
        is_exact = plan.is_exact and left is None

        def call_of(few: Inputs, sizes: list[int]) -> Call:
            dims = dims_by_name(self.batch_dims, few, self.module)
            packs = None if left is None else self._packs(few, left, sizes)
            policy = BatchNormPolicy("exact" if is_exact else "micro", self.module)
            call = self._call(_Plan(few, dims, 0, sizes, packs, is_exact, False), policy)
            call.first_outputs = {}
            return call

        trims = left is not None
        return prove(self.module, call_of, inputs, plan.dims, exact=is_exact, batch_norm=batch_norm, trims=trims)

    def verify(self, *args: Any, **kwargs: Any) -> None:
        """Prove with these inputs that micro-batches give the outputs and gradients of a few of their rows at once.

        Raises:
            NotEquivalentError: They don't; the message names the first layer whose outputs depend on other rows, or
                what leaves the module besides its outputs.
            ValueError: The rows can't be compared; the message says why.

        Example:
            >>> chunked(nn.Linear(4, 2), 32).verify(torch.randn(256, 4))
        """
        plan = self._plan(self._inputs(args, kwargs), self._left)
        for remark in self._findings(plan, batch_norm=self.policy.choice != "frozen").remarks:
            logger.warning(remark)

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
                f"{path or 'The module'!r} is a TorchScript module, whose parameters can't be put in place of each "
                "other. Chunk the module that it was made of."
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
