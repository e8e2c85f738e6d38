"""Keras on PyTorch: a loop of Python's over the rows of a batch, in which autograd sums into the variables' gradients.

Where a micro-batch doesn't fit into memory the batch starts over, from how everything was when it began, in smaller
ones.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import torch
from keras import tree

from gradaccum.core.sizes import BatchSizeFinder, Rows, Slice
from gradaccum.keras.backends import base
from gradaccum.keras.backends.base import Micro
from gradaccum.keras.backends.rows import RestartWindow, Result, Spec, assign, discarded, has_rows, values_of
from gradaccum.keras.optimizer.window import Counts, Window, is_overwritten
from gradaccum.keras.private import (
    in_stateless_scope,
    keras_mask,
    layers_in,
    own_trainable_variables,
    set_keras_mask,
    torch_device,
    uncast_values,
)
from gradaccum.on_torch.memory import MemoryMeter, is_out_of_memory
from gradaccum.on_torch.oom_retry import nothing_fits
from gradaccum.on_torch.private import run_backward
from gradaccum.on_torch.random_state import RandomState, all_generators, every_device, kept
from gradaccum.on_torch.state import WindowState

__all__: list[str] = []

lazy_divisors = True  # a first pass that counts costs a third

logger = logging.getLogger("gradaccum")


class MicroBatches:
    """A batch, cut in pieces as they come: while a size is searched for, each has another one."""

    def __init__(
        self,
        data: Any,
        rows: int,
        pieces: Any,
        around: Callable[[Slice], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.data, self.rows, self.pieces, self.around = data, rows, pieces, around
        self.ran: list[Slice] = []

    def take(self, piece: Slice) -> Any:
        """The micro-batch of these rows."""
        return tree.map_structure(lambda leaf: leaf[piece.rows] if has_rows(leaf) else leaf, self.data)

    def run(
        self, micro: Micro, carry: Any, specs: Any = (), threads: Any = (), begin: int = 0
    ) -> tuple[Any, list[Any]]:
        self.ran, outputs = [], []
        for piece in itertools.islice(self.pieces, begin, None):
            with self.around(piece):
                carry, kept = micro(self.take(piece), piece.size, carry)
            self.ran.append(piece)
            outputs.append(kept)
        return carry, [torch.cat(parts) for parts in zip(*outputs)]

    @property
    def count(self) -> int:
        return len(self.pieces)

    def at(self, index: int) -> tuple[Any, int]:
        return self.take(self.pieces[index]), self.pieces[index].size

    def of(self, data: Any) -> MicroBatches:
        return MicroBatches(data, self.rows, self.pieces, self.around)

    def joined(self, parts: Sequence[Any], begin: int = 0) -> Any:
        if begin:
            rows = sum(piece.size for piece in self.pieces[:begin])
            parts = [parts[0].new_zeros(rows, *parts[0].shape[1:]), *parts]
        return torch.cat(list(parts)) if len(parts) > 1 else parts[0]

    def part(self, output: Any) -> Any:
        return output


def take_rows(leaf: Any, rows: Any) -> Any:
    """These rows of an array."""
    return leaf[rows]


class GradientSum:
    """Gradients of a model's trainable weights: in `.grad` where that has at least 32 bits, else beside it in float32.

    Of variables that are overwritten with their gradient, the largest.
    """

    specs: tuple[Spec, ...] = ()

    def __init__(self, model: Any, overwriting: frozenset[int], before_backward: Callable[[], None]) -> None:
        self.model, self.overwriting, self.before_backward = model, overwriting, before_backward
        self.parameters = values_of(model.trainable_weights)
        half = {index for index, p in enumerate(self.parameters) if p.dtype in (torch.float16, torch.bfloat16)}
        self.apart = sorted(half | overwriting)

    def zeros(self) -> Any:
        self.model.zero_grad()
        return {}

    def add(self, sums: Any, forward: Callable[[], Any], share: Any) -> Any:
        scaled, others = forward()
        self.before_backward()
        if self.parameters:
            run_backward([scaled], [torch.full_like(scaled, share, requires_grad=False)])
        for index in self.apart:
            gradient, self.parameters[index].grad = self.parameters[index].grad, None
            if gradient is None:
                continue
            if index not in sums:
                sums[index] = gradient.float()
            elif index in self.overwriting:
                sums[index] = torch.maximum(sums[index], gradient.float())
            else:
                sums[index] += gradient
        return sums, tree.map_structure(_detached, others), []

    def finish(self, sums: Any, kept: list[Any], scale: Any = None) -> list[Any]:
        gradients = [sums.get(index, parameter.grad) for index, parameter in enumerate(self.parameters)]
        for index, gradient in enumerate(gradients):
            if scale is not None and gradient is not None and index not in self.overwriting:
                gradient *= scale
        return gradients


def _detached(one: Any) -> Any:
    """A tensor without its graph, with its mask."""
    if not torch.is_tensor(one):
        return one
    detached, mask = one.detach(), keras_mask(one)
    if mask is not None:
        set_keras_mask(detached, mask)
    return detached


class Training(base.Training):
    """What a training step leaves to PyTorch: memory, and random numbers of PyTorch's own."""

    def __init__(self, step: Any) -> None:
        super().__init__(step)
        device = torch.device(torch_device())
        self.gauge = MemoryMeter(device)
        self.window_state = WindowState([step.model], device, parameters=self._trained, others=self._places)
        self.sizers: BatchSizeFinder | None = None
        self.as_cut = False
        """Whether a micro-batch that does not fit is an error, and not run in smaller ones."""
        self._piece: Slice | None = None
        self._measuring, self._live = False, 0.0
        self._counted: list[Slice] | None = None
        """The micro-batches in which divisors were counted, where these hang on random numbers."""

    def call(self, *args: Any) -> Any:
        (data,) = args
        proof = self.step.proof
        if proof is None or not proof.is_due(1):
            return self._update(data)
        self.step.build(data)
        proof.run(data)
        logs = self._update(data)
        proof.warn()
        return logs

    def _update(self, data: Any) -> Any:
        logs = self.step.update(data)
        self.window_state.close()
        return logs

    def build(self, data: Any) -> None:
        self.step.build(data)
        self.window_state.forget()

    def attempt(self, data: Any, rows: Any, size: Any, run: Callable[[Any, Any], Any]) -> Any:
        step = self.step
        if self.sizers is None:  # only a model that is built has all its layers
            self.sizers = BatchSizeFinder(step.micro_batch_size, self.gauge.limit, minimum=2 if step.batch_norms else 1)
        leaves = [("/".join(map(str, path)), leaf, 0) for path, leaf in tree.flatten_with_path(data) if has_rows(leaf)]
        sums = GradientSum(step.model, step.overwriting, self._before_backward)
        self.window_state.open()
        given: list[Slice] | None = None
        while True:
            plan = Rows(self.sizers.of(leaves), rows)
            batches = MicroBatches(data, rows, plan if given is None else given, self._around(plan))
            self._counted = self._piece = too_large = smaller = None
            try:
                window = run(batches, sums)
                if self._counted in (None, batches.ran):
                    self.sizers.close(plan.sizer, rows)
                    return window
                given = batches.ran  # to be counted as they ran
            except RestartWindow:
                pass
            except BaseException as error:
                too_large = self._piece
                if not self.as_cut and is_out_of_memory(error) and too_large is not None and too_large.size > 1:
                    smaller = plan.too_large(too_large.size)
                if smaller is None:
                    step.model.zero_grad()
                    self.window_state.abandon()
                    if self.as_cut or not is_out_of_memory(error):
                        raise
                    raise nothing_fits(error) from error  # type: ignore[arg-type]  # it is an Exception
                given = None
            if (
                smaller is not None and too_large is not None
            ):  # only here, out of reach of the error's frames, is its memory free
                self.gauge.release()
                logger.warning(
                    "Out of memory with a micro-batch of %d rows: the batch starts over in micro-batches of %d.",
                    too_large.size,
                    smaller.size,
                )
            self.window_state.restart()

    def _around(self, plan: Rows) -> Callable[[Slice], contextlib.AbstractContextManager[None]]:
        @contextlib.contextmanager
        def around(piece: Slice) -> Iterator[None]:
            self._piece, gauge = piece, self.gauge
            self._measuring = plan.measuring and torch.is_grad_enabled()
            if not self._measuring:
                yield
            else:
                gauge.synchronize()
                base, mark, began = gauge.live(), gauge.mark(), time.perf_counter()
                yield
                gauge.synchronize()
                seconds, highest = time.perf_counter() - began, gauge.mark()
                # The mark tells this micro-batch's peak where it has risen; else what was alive before backward has to.
                plan.record(piece, seconds, base, highest if highest > mark else self._live)

        return around

    def _before_backward(self) -> None:
        if self._measuring:
            self._live = self.gauge.live()

    def look(self, function: Callable[[Any], Any], batches: Any) -> Any:
        pieces = [Slice(slice(0, rows)) for rows in (min(2, batches.rows), 1)]
        for piece in pieces:
            try:
                with torch.no_grad():
                    return function(batches.take(piece))
            except Exception as error:
                self._piece = pieces[-1]
                if not is_out_of_memory(error) or piece.size == 1:
                    raise
            finally:
                self.window_state.restart()
            self.gauge.release()
        raise AssertionError("two rows, or one")

    @contextlib.contextmanager
    def counting(self, batches: Any) -> Iterator[Any]:
        pieces = batches.pieces  # while a size is searched for, they are not known beforehand
        cut = pieces if isinstance(pieces, list) else Slice(slice(0, batches.rows)).split(pieces.sizer.size)
        with torch.no_grad(), discarded(self.step.model) as scope:
            yield MicroBatches(batches.data, batches.rows, cut, batches.around)
        if scope.assigned or self.window_state.rng_used():
            self._counted = cut
        self.window_state.restart()

    def eagerly(self) -> contextlib.AbstractContextManager[Any]:
        """While this is open, random numbers are drawn that nobody misses afterwards."""
        return torch.random.fork_rng()

    def compute(self, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
        # On PyTorch, Keras' losses multiply sample weights with masks in place: they get copies.
        weights = tree.map_structure(lambda one: one.clone() if torch.is_tensor(one) else one, sample_weight)
        return super().compute(x, y, weights)

    @torch.no_grad()
    def apply(self, gradients: list[Any]) -> None:
        self.step.model.optimizer.apply(gradients, self.step.model.trainable_weights[:])

    def evaluate(self, data: Any, state: Any) -> tuple[Any, list[Any], list[Any], list[Any]]:
        step, model = self.step, self.step.model
        variables = [variable for part in step.variables() for variable in part]
        found = None if state is None else [value.detach().clone() for value in values_of(variables)]
        self.as_cut = True
        own = [value.grad for value in values_of(model.trainable_variables)]
        try:
            if state is not None:
                with torch.no_grad():
                    assign(variables, [value for part in state for value in part])
            before = [value.detach().clone() for value in values_of(model.non_trainable_variables)]
            window = step.window(data)
            self.drew = self.window_state.rng_used()
            after = [value.detach().clone() for value in values_of(model.non_trainable_variables)]
            return window.loss, [None if g is None else g.clone() for g in window.gradients], before, after
        finally:
            if self.sizers is not None:
                self.window_state.abandon()
            if found is not None:
                with torch.no_grad():
                    assign(variables, found)
            for value, gradient in zip(values_of(model.trainable_variables), own):
                value.grad = gradient

    def make_train_function(self, make: Callable[[], None]) -> None:
        """Keras' own, which would hand the whole step to torch.compile where it is asked to."""
        if self.step.model.jit_compile:
            raise ValueError(
                "micro_batched on PyTorch runs a loop that torch.compile can't take as a whole. Received: "
                "jit_compile=True. Pass jit_compile=False to compile(), or train on the JAX or TensorFlow backend, "
                "where the loop is compiled."
            )
        make()

    def _trained(self) -> list[torch.Tensor]:
        return values_of(self.step.model.trainable_weights)

    def _places(self) -> list[tuple[dict[str, Any], str]]:
        """Where Keras keeps what a forward pass or a metric moves: not in buffers of the modules."""
        model = self.step.model
        weights = {id(v) for layer in [model, *layers_in(model)] for v in own_trainable_variables(layer)}  # frozen ones
        variables = [*model.non_trainable_variables, *model.metrics_variables]
        return [(vars(variable), "_value") for variable in variables if id(variable) not in weights]


# A chunked layer.


def chunks(tensors: list[Any], micro_batch_size: int) -> MicroBatches:
    """Its inputs in micro-batches."""
    rows = tensors[0].shape[0]
    return MicroBatches(tensors, rows, Slice(slice(0, rows)).split(micro_batch_size))


class Program:
    """A chunked layer's call as a function of its weights, with the random numbers of the first pass in the second."""

    def __init__(self, body: Any, batches: MicroBatches) -> None:
        self.body = body
        self._random: list[RandomState] = []
        self._generators: Any = None
        self._again: Iterator[RandomState] | None = None
        self._variables, self._raw = list[Any](), list[Any]()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda")
        ]

    def start(self) -> Any:
        return None

    @property
    def weights(self) -> list[Any]:
        """What the call reads that may need gradients."""
        return [*uncast_values(self._variables), *self._raw, *self.body.shared]

    def evaluate(self, weights: Any, carry: list[Any] | None, tensors: list[Any]) -> Result:
        body = self.body
        if self._again is not None:
            next(self._again).put_back()
        elif self._generators is not None:
            self._random.append(RandomState(self._generators))
        if carry is None:
            result = body.run(tensors)
            body.state.read()
            self._variables = [v for v in body.read if v.trainable]
            own = set(map(id, uncast_values(self._variables)))
            # Those of a torch.nn.Module inside, which Keras' variables don't stand for.
            modules = body.layer.parameters() if isinstance(body.layer, torch.nn.Module) else []
            self._raw = [p for p in modules if p.requires_grad and id(p) not in own]
            return result
        values = [*zip(body.state.variables, body.state.values(carry))]
        if weights is None:
            result = body.run(tensors, values)
        else:
            shared = weights[len(self._variables) + len(self._raw) :]
            result = body.run(tensors, [*zip(self._variables, weights), *values], shared)
        body.check_rows(tensors[0].shape[0], [tuple(output.shape) for output in result.outputs])
        return result

    def is_raw(self, tensor: Any) -> bool:
        """Whether nothing can stand in for this parameter."""
        return any(tensor is parameter for parameter in self._raw)

    @contextlib.contextmanager
    def first_pass(self) -> Iterator[None]:
        """While this is open, random states are remembered, and nothing is recorded for gradients."""
        self._generators = all_generators(every_device())
        with torch.no_grad():
            yield
        self._generators = None

    @contextlib.contextmanager
    def second_pass(self) -> Iterator[None]:
        """While this is open, random numbers are drawn again."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(kept(self._random[0].states))
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled) if enabled else contextlib.nullcontext())
            self._again = iter(self._random)
            try:
                yield
            finally:
                self._again = None


def recomputed(passes: Any, carry: Any) -> tuple[list[Any], list[Any]]:
    program, body = passes.program, passes.body
    with program.first_pass():
        outputs, after = passes.first(None, body.tensors, carry)
    start = body.state.start() if carry is None else carry
    return [*_TwoPasses.apply(passes, start, outputs, len(program.weights), *program.weights, *body.tensors)], after


class _TwoPasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: Any, start: Any, outputs: list[Any], weights: int, *tensors: Any) -> Any:
        ctx.passes, ctx.start, ctx.weights = passes, start, weights
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(o for o in outputs if not (o.is_floating_point() or o.is_complex())))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        needed, tensors = ctx.needs_input_grad[4:], ctx.saved_tensors
        if all(given is None for given in upstream):
            return (None,) * (4 + len(needed))
        wanted = [n for n, need in enumerate(needed) if need]
        with ctx.passes.program.second_pass():
            weights, rows = tensors[: ctx.weights], tensors[ctx.weights :]
            return None, None, None, None, *ctx.passes.second(weights, rows, ctx.start, list(upstream), wanted)


def pullback(
    function: Callable[[list[Any]], Any], inputs: list[Any], given: list[Any], program: Program
) -> tuple[list[Any], Any]:
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = [
            one if program.is_raw(one) else one.view_as(one) if again else one.detach().requires_grad_()
            for one in inputs
        ]
        outputs, others = function(leaves)
        roots = [(output, one) for output, one in zip(outputs, given) if output.requires_grad]
        if not roots:
            return [None] * len(inputs), others
        return [
            *torch.autograd.grad(
                [root for root, _ in roots], leaves, [one for _, one in roots], allow_unused=True, create_graph=again
            )
        ], others


def _leaf(tensor: torch.Tensor, _: Any) -> torch.Tensor:
    return tensor.detach().requires_grad_()


def no_gradient_yet(weight: Any) -> Any:
    """What gradients are added to."""
    return None


def added(total: Any, gradient: Any) -> Any:
    """A sum with one more gradient in it: half precision in float32, as sums of many lose what they add otherwise."""
    if gradient is None:
        return total
    gradient = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
    return gradient if total is None else total + gradient


def dense(gradient: Any, tensor: Any) -> Any:
    return torch.zeros_like(tensor) if gradient is None else gradient


unrecorded = torch.no_grad
"""While this is open, nothing is recorded for gradients."""


def plainly(run: Callable[[], Any]) -> Any:
    return torch._dynamo.disable(run)() if torch.compiler.is_compiling() else run()


# Evaluating beside what runs.


def unprovable() -> str:
    return "inside of torch.compile" if torch.compiler.is_compiling() else ""


def outer_tensors(outputs: list[Any], values: list[Any], layer: Any) -> list[tuple[int, ...]]:
    own = {id(value) for value in values}
    if isinstance(layer, torch.nn.Module):
        own |= {id(parameter) for parameter in layer.parameters()}
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, found = set(waiting), []
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in own:
            found.append(tuple(leaf.shape))
        new = [after for after, _ in node.next_functions if after is not None and after not in seen]
        seen.update(new)
        waiting += new
    return found


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """While this is open, PyTorch's generators are left alone."""
    with torch.random.fork_rng(), torch.enable_grad():
        yield


# An optimizer's window.


@torch.no_grad()
def accumulate(window: Window, gradients: list[Any], rows: Any) -> None:
    if in_stateless_scope():  # what the caller gave stays as it is
        for variable in [*window.sums, window.counts, window.touched]:
            variable.assign(variable.value.clone())
    counts, weight, rescale, closes = window.rule.add(_read(window), rows)
    if rescale not in (None, 1):
        scaled = [t.value for t, v in zip(window.sums, window.variables) if not is_overwritten(v)]
        if scaled:
            torch._foreach_mul_(scaled, rescale)
    plain: tuple[list[Any], list[Any]] = ([], [])
    for index, (total, gradient) in enumerate(zip(window.sums, gradients)):
        if gradient is None:
            continue
        window.touched.value[index] = 1
        if is_overwritten(window.variables[index]):
            total.assign(torch.maximum(total.value, gradient.to(total.value.dtype)))
        else:
            plain[0].append(total.value)
            plain[1].append(gradient)
    if plain[0]:
        torch._foreach_add_(*plain, alpha=weight)
    _write(window, counts)
    if closes:
        close(window)


@torch.no_grad()
def close(window: Window) -> None:
    inner, variables = window.inner, window.variables
    counts, sums = _read(window), [total.value for total in window.sums]
    mean = [t for t, v in zip(sums, variables) if not is_overwritten(v)]
    if counts.weight != 1 and mean:
        torch._foreach_div_(mean, counts.weight)  # in place: the sums are emptied below
    touched = window.touched.value.tolist()
    gradients = [
        total.to(variable.value.dtype) if is_touched else None
        for total, variable, is_touched in zip(sums, variables, touched)
    ]
    # Reading the count waits for the device, so only where the inner optimizer may have skipped the update.
    before = int(inner.iterations) if window.may_skip else -1
    if any(touched):
        inner.apply(gradients, variables)
    updated = int(not window.may_skip or int(inner.iterations) != before)
    if in_stateless_scope():  # where assigning keeps the tensor: these may be the new values of something
        for total in window.sums:
            total.assign(torch.zeros_like(total.value))
    else:
        torch._foreach_zero_(sums)
    window.touched.value.zero_()
    _write(window, window.rule.closed(counts, updated))


def _read(window: Window) -> Counts:
    return Counts(*window.counts.value.tolist())


def _write(window: Window, counts: Counts) -> None:
    window.counts.value.copy_(torch.tensor(counts))


def host() -> Any:
    return keras.device("cpu")
