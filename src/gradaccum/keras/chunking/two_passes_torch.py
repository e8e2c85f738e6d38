"""The two passes on PyTorch: a `torch.autograd.Function` over the micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from gradaccum.core.sizes import even_sizes
from gradaccum.keras.chunking.body import Body, Result
from gradaccum.keras.private import uncast_values
from gradaccum.on_torch.random_state import RandomState, all_generators, every_device, kept

__all__ = ["two_passes"]


def two_passes(body: Body, micro_batch_size: int, keep: int) -> list[Any]:
    """The outputs of the whole batch."""
    if torch.compiler.is_compiling():  # the two passes are no graph
        return torch._dynamo.disable(lambda: _Passes(body, micro_batch_size, keep).run())()
    return _Passes(body, micro_batch_size, keep).run()


class _Passes:
    def __init__(self, body: Body, micro_batch_size: int, keep: int) -> None:
        self.body, self.keep = body, keep
        self.rows = body.tensors[0].shape[0]
        self.sizes = even_sizes(self.rows, micro_batch_size)
        ends = [sum(self.sizes[: n + 1]) for n in range(len(self.sizes))]
        self.slices = [slice(end - size, end) for size, end in zip(self.sizes, ends)]
        self.random: dict[int, RandomState] = {}
        self.variables: list[Any] = []
        self.raw: list[Any] = []
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda")
        ]

    def run(self) -> list[Any]:
        """The outputs of the whole batch."""
        body = self.body
        carry: list[Any] = []
        parts = []
        for index in range(min(self.keep, len(self.sizes))):
            result, carry = self._forward(index, carry)
            parts.append(result.outputs)
        rest = range(self.keep, len(self.sizes))
        if rest:
            self.start, found = carry, []
            generators = all_generators(every_device())
            with torch.no_grad():
                for index in rest:
                    self.random[index] = RandomState(generators)
                    result, carry = self._forward(index, carry)
                    found.append(result.outputs)
            self.start = self.start if self.keep else body.state.start()
            joined = [torch.cat(pieces) for pieces in zip(*found)]
            self.variables = [v for v in body.read if v.trainable]
            weights = uncast_values(self.variables)
            known = set(map(id, weights))
            # Those of a torch.nn.Module inside, which Keras' variables don't stand for.
            modules = body.layer.parameters() if isinstance(body.layer, torch.nn.Module) else []
            self.raw = [p for p in modules if p.requires_grad and id(p) not in known]
            parts.append(_TwoPasses.apply(self, joined, *weights, *self.raw, *body.shared, *body.tensors))
        body.state.finish([value.detach() for value in carry])
        return [torch.cat(pieces) if len(pieces) > 1 else pieces[0] for pieces in zip(*parts)]

    def _forward(self, index: int, carry: list[Any]) -> tuple[Result, list[Any]]:
        body = self.body
        tensors = [tensor[self.slices[index]] for tensor in body.tensors]
        first = not hasattr(body, "state")
        result = body.run(tensors, () if first else zip(body.state.variables, body.state.values(carry)))
        if first:
            body.state.read()
            carry = body.state.start()
        else:
            body.check_rows(self.sizes[index], [tuple(output.shape) for output in result.outputs])
        return result, self._after(carry, result, index)

    def _after(self, carry: list[Any], result: Result, index: int) -> list[Any]:
        with torch.no_grad():
            return self.body.state.after(carry, result.values, result.valid, self.sizes[index], self.rows)

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(kept(next(iter(self.random.values())).states))
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled) if enabled else contextlib.nullcontext())
            stack.enter_context(torch.enable_grad())
            yield

    def gradients(self, tensors: Any, needed: Any, upstream: Any) -> list[Any]:
        """Of the weights and of what has rows; as a graph where gradients are to be differentiated again."""
        body, count = self.body, len(self.variables)
        scalars = count + len(self.raw)
        shared = scalars + len(body.shared)
        again = torch.is_grad_enabled()

        def leaf(tensor: Any, need: bool) -> Any:
            return tensor.view_as(tensor) if again and need else tensor.detach().requires_grad_(need)

        leaves = [leaf(tensor, need) for tensor, need in zip(tensors[:count], needed)]
        leaves += self.raw
        leaves += [leaf(tensor, need) for tensor, need in zip(tensors[scalars:shared], needed[scalars:shared])]
        sums: list[Any] = [None] * len(tensors)
        carry = self.start
        before = sum(self.sizes[: self.keep])
        with self._as_before():
            for index, random in self.random.items():
                rows = self.slices[index]
                behind = slice(rows.start - before, rows.stop - before)
                own = [leaf(tensor[rows], need) for tensor, need in zip(tensors[shared:], needed[shared:])]
                random.put_back()
                values = [*zip(self.variables, leaves), *zip(body.state.variables, body.state.values(carry))]
                result = body.run(list(own), values, leaves[scalars:])
                carry = self._after(carry, result, index)
                roots = [
                    (output, given[behind])
                    for output, given in zip(result.outputs, upstream)
                    if given is not None and output.requires_grad
                ]
                if not roots:
                    continue
                wanted = [n for n, need in enumerate(needed) if need]
                inputs = [*leaves, *own]
                found = torch.autograd.grad(
                    [root for root, _ in roots],
                    [inputs[n] for n in wanted],
                    [given for _, given in roots],
                    allow_unused=True,
                    create_graph=again,
                )
                for n, gradient in zip(wanted, found):
                    if gradient is None:
                        continue
                    if n >= shared:
                        if sums[n] is None:
                            sums[n] = torch.zeros_like(tensors[n])
                        sums[n][rows] = gradient  # its graph goes on through the copy
                    else:
                        gradient = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
                        sums[n] = gradient if sums[n] is None else sums[n] + gradient
        return [None if total is None else total.to(tensor.dtype) for total, tensor in zip(sums, tensors)]


class _TwoPasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: _Passes, outputs: list[Any], *tensors: Any) -> Any:
        ctx.passes = passes
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(o for o in outputs if not (o.is_floating_point() or o.is_complex())))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        needed = ctx.needs_input_grad[2:]
        if all(given is None for given in upstream):
            return (None,) * (2 + len(needed))
        return None, None, *ctx.passes.gradients(ctx.saved_tensors, needed, upstream)
