"""Keras on PyTorch: a loop of Python's over the rows of a batch, in which autograd sums into the variables' gradients.

Where a micro-batch doesn't fit into memory the batch starts over, from how everything was when it began, in smaller
ones.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import keras
import torch
from keras import tree

from gradaccum.core.sizes import BatchSizeFinder, Rows, Slice
from gradaccum.keras import private
from gradaccum.keras.backends import base
from gradaccum.keras.backends.base import RestartWindow, Result, assign, copies_of, has_rows, values_of
from gradaccum.on_torch.foreach import scale_
from gradaccum.on_torch.grad_buffer import GradientBuffer, WindowTotal
from gradaccum.on_torch.memory import MemoryMeter
from gradaccum.on_torch.oom_retry import OomRetry
from gradaccum.on_torch.private import graph_of
from gradaccum.on_torch.random_state import Conditions, all_generators, every_device, kept
from gradaccum.on_torch.stages import gradient_stages, run_stages
from gradaccum.on_torch.state import WindowState

STAGES = gradient_stages({})
"""What a wrapped optimizer's window ends with, as in PyTorch's own shell. A Keras optimizer clips by itself."""


class MicroBatches(base.MicroBatches):
    """A batch, cut in pieces as they come: while a size is searched for, each has another one."""

    def __init__(self, data: Any, rows: int, pieces: Any) -> None:
        self.data, self.rows, self.pieces = data, rows, pieces
        self.ran: list[Slice] = []

    def take(self, start: int, size: int) -> Any:
        return tree.map_structure(lambda leaf: leaf[start : start + size] if has_rows(leaf) else leaf, self.data)

    def segments(self, begin: int) -> Iterator[tuple[Any, Any, Callable[[Any], tuple[Any, Any]]]]:
        yield begin, None, lambda piece: (piece.rows.start, piece.size)

    def loop(self, first: int, stop: None, body: Any, carry: Any, specs: Any) -> tuple[Any, list[Any]]:
        self.ran, outputs = [], []
        for piece in itertools.islice(self.pieces, first, None):
            self.ran.append(piece)
            carry, kept = body(piece, carry)
            outputs.append(kept)
        return carry, [torch.cat(parts) for parts in zip(*outputs)]

    @property
    def count(self) -> int:
        return len(self.pieces)

    def bounds(self, index: int) -> tuple[int, int]:
        return sum(piece.size for piece in self.pieces[:index]), self.pieces[index].size


class GradientSum(base.GradientSum):
    """In `.grad` where that has at least 32 bits, else beside it in float32."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.parameters = values_of(self.weights)
        half = {index for index, p in enumerate(self.parameters) if p.dtype in (torch.float16, torch.bfloat16)}
        self.outside = sorted(half | self.overwriting)

    def zeros(self) -> Any:
        self.model.zero_grad()
        return {}

    def add(self, sums: Any, forward: Callable[[], Any], share: Any) -> Any:
        others = self.both_passes(forward, share)
        for index in self.outside:
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

    def both_passes(self, forward: Callable[[], Any], share: Any) -> Any:
        """A micro-batch forward and backward. Returns what `forward` has given beside the loss."""
        loss, others = forward()
        self.backward(loss, share)
        return others

    def backward(self, loss: torch.Tensor, share: Any) -> None:
        if self.parameters:
            loss.backward(torch.full_like(loss, share, requires_grad=False))

    def finish(self, sums: Any, kept: list[Any], scale: Any = None) -> list[Any]:
        gradients = [sums.get(index, parameter.grad) for index, parameter in enumerate(self.parameters)]
        plain = [one for i, one in enumerate(gradients) if one is not None and i not in self.overwriting]
        if scale is not None:  # what the losses were taken to divide by is known now
            scale_(plain, scale)
        return gradients


class MeasuredGradientSum(GradientSum):
    """The same while a size is searched for: what each micro-batch costs is measured."""

    def __init__(self, model: Any, retry: OomRetry, plan: Rows, batches: MicroBatches) -> None:
        super().__init__(model)
        self.retry, self.plan, self.batches = retry, plan, batches

    def both_passes(self, forward: Callable[[], Any], share: Any) -> Any:
        others: list[Any] = []

        def forwarded(piece: Slice) -> Any:
            loss, more = forward()
            others.append(more)
            return loss

        passes = SimpleNamespace(forward=forwarded, backward=lambda piece, loss: self.backward(loss, share))
        self.retry.once(self.batches.ran[-1], self.plan, passes)
        return others[0]


def _detached(one: Any) -> Any:
    """A tensor without its graph, with its mask."""
    if not torch.is_tensor(one):
        return one
    detached, mask = one.detach(), private.keras_mask(one)
    if mask is not None:
        private.set_keras_mask(detached, mask)
    return detached


class Training(base.Training):
    """What a training step leaves to PyTorch: memory, and random numbers of PyTorch's own."""

    def __init__(self, step: Any) -> None:
        super().__init__(step)
        device = torch.device(private.torch_device())
        self.meter = MemoryMeter(device)
        self.window_state = WindowState([step.model], device, parameters=self._trained, others=self._places)
        self.sizers: BatchSizeFinder | None = None
        self._proves = False
        """Whether a micro-batch that does not fit is an error, and not run in smaller ones."""

    def call(self, *args: Any) -> Any:
        logs = super().call(*args)
        self.window_state.close()
        return logs

    def forget(self) -> None:
        self.window_state.forget()

    def attempt(self, data: Any, rows: Any, size: Any, run: Callable[[Any, Any], Any]) -> Any:
        step = self.step
        if self.sizers is None:  # only a model that is built has all its layers
            self.sizers = BatchSizeFinder(step.micro_batch_size, self.meter.limit, minimum=2 if step.batch_norms else 1)
        leaves = [("/".join(map(str, path)), leaf, 0) for path, leaf in tree.flatten_with_path(data) if has_rows(leaf)]
        self.window_state.open()
        cut: list[Slice] | None = None
        try:
            while True:
                plan = Rows(self.sizers.of(leaves), rows)
                batches = MicroBatches(data, rows, plan if cut is None else cut)
                measured = (OomRetry(self.meter), plan, batches) if plan.measuring else None
                try:
                    window = run(
                        batches, MeasuredGradientSum(step.model, *measured) if measured else GradientSum(step.model)
                    )
                    break
                except RestartWindow:
                    if cut is not None:
                        raise ValueError(
                            "What the losses divide by changes each time the batch runs: a mask is drawn with random "
                            "numbers that can't be repeated. Draw it with keras.random and a SeedGenerator."
                        ) from None
                    cut = batches.ran
                except Exception as error:
                    if self._proves:
                        raise
                    OomRetry(self.meter).smaller(error, batches.ran[-1] if batches.ran else Slice(slice(0, 1)), plan)
                    cut = None
                self.meter.release()  # only here, out of reach of an error's frames, is its memory free
                self.window_state.restart()
        except BaseException:
            step.model.zero_grad()
            self.window_state.abandon()
            raise
        self.drew = self._proves and self.window_state.rng_used()
        self.sizers.close(plan.sizer, rows)
        return window

    @torch.no_grad()
    def look(self, function: Callable[[Any], Any], batches: Any) -> Any:
        rows = batches.rows
        # Of two rows: one may have no memory, and a loss of few rows may be an error.
        for few in (rows,) if private.stateful_layers(self.step.model) else (min(2, rows), 1, rows):
            with contextlib.suppress(Exception):
                try:
                    return function(batches.take(0, few))
                finally:
                    self.window_state.restart()
            self.meter.release()
        return function(batches.take(0, rows))

    @torch.no_grad()
    def counted(self, batches: Any, run: Callable[[Any], Any]) -> Any:
        pieces = batches.pieces  # while a size is searched for, they are not known beforehand
        cut = pieces if isinstance(pieces, list) else Slice(slice(0, batches.rows)).split(pieces.sizer.size)
        found = super().counted(MicroBatches(batches.data, batches.rows, cut), run)
        self.window_state.restart()
        return found

    def evaluate(self, data: Any, state: Any) -> tuple[Any, list[Any], list[Any], list[Any]]:
        """Other weights are assigned, and taken back: nothing stands in for those of a torch.nn.Module inside."""
        self._proves = True
        trained, moving, *_ = self.step.variables()
        own, found = [value.grad for value in self._trained()], [] if state is None else copies_of(trained)
        try:
            if state is not None:
                assign(trained, state[0])
            before = copies_of(moving)
            return (*self.sums(data), before, copies_of(moving))
        finally:
            self.window_state.abandon()
            if state is not None:
                assign(trained, found)
            for value, gradient in zip(self._trained(), own):
                value.grad = gradient

    def make_train_function(self, make: Callable[[], None]) -> None:
        """Keras' own, which would hand the whole step to torch.compile where it is asked to."""
        if self.step.model.jit_compile:
            raise ValueError(
                "On PyTorch, micro_batched runs a Python loop, which torch.compile can't compile as a whole. Received: "
                "jit_compile=True. Pass jit_compile=False to compile(), or use the JAX or TensorFlow backend, where "
                "the loop is compiled."
            )
        super().make_train_function(make)

    def again(self, batches: list[Any], iterator: Any) -> Any:
        return batches

    def _trained(self) -> list[torch.Tensor]:
        return values_of(self.step.model.trainable_weights)

    def _places(self) -> list[tuple[dict[str, Any], str]]:
        """Where Keras keeps what a forward pass or a metric moves: not in buffers of the modules."""
        model = self.step.model
        layers = [model, *private.layers_in(model)]
        weights = {id(v) for layer in layers for v in private.own_trainable_variables(layer)}  # frozen ones
        variables = [*model.non_trainable_variables, *model.metrics_variables]
        return [(vars(variable), "_value") for variable in variables if id(variable) not in weights]


class Program(base.Program):
    """A chunked layer's call. What it moves shows only in it."""

    around: Callable[[], Any] = contextlib.nullcontext  # of each evaluation

    def start(self) -> Any:
        """Not known yet."""

    def evaluate(self, weights: Any, carry: Any, tensors: list[Any]) -> Result:
        body = self.body
        with self.around():
            result = body.run(tensors) if carry is None else super().evaluate(weights, carry, tensors)
        if carry is None:
            body.state.read()
            # Keras' variables don't stand for the parameters of a torch.nn.Module inside.
            modules = body.layer.parameters() if isinstance(body.layer, torch.nn.Module) else []
            self.settle([parameter for parameter in modules if parameter.requires_grad])
        else:
            body.check_rows(tensors[0].shape[0], [tuple(output.shape) for output in result.outputs])
        return result


class _TwoPasses(torch.autograd.Function):
    """The outputs of a first pass; `begun` are the conditions in which its micro-batches began."""

    @staticmethod
    def forward(ctx: Any, passes: Any, start: Any, begun: list[Conditions], outputs: list[Any], *tensors: Any) -> Any:
        ctx.passes, ctx.start, ctx.begun = passes, start, begun
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(o for o in outputs if not (o.is_floating_point() or o.is_complex())))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        passes, needed, begun = ctx.passes, ctx.needs_input_grad, iter(ctx.begun)
        if all(given is None for given in upstream):
            return (None,) * len(needed)
        wanted = [n for n, need in enumerate(needed[4:]) if need]
        passes.program.around = lambda: next(begun).restored()
        with kept(ctx.begun[0].random.states):  # random numbers are drawn again
            return (None,) * 4 + (*passes.second(ctx.saved_tensors, ctx.start, list(upstream), wanted),)


class Backend(base.Backend):
    training, program = Training, Program
    lazy_divisors = True  # a first pass that counts costs a third

    def device(self) -> str:
        return str(private.torch_device()).partition(":")[0]

    def take_rows(self, leaf: Any, rows: Any) -> Any:
        return leaf[rows]

    @torch.no_grad()
    def apply(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        optimizer.apply(gradients, variables[:])

    def chunks(self, tensors: list[Any], micro_batch_size: int) -> MicroBatches:
        rows = tensors[0].shape[0]
        return MicroBatches(tensors, rows, Slice(slice(0, rows)).split(micro_batch_size))

    def recomputed(self, passes: Any, carry: Any) -> tuple[list[Any], list[Any]]:
        begun: list[Conditions] = []

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            begun.append(Conditions(all_generators(every_device()), every_device()))
            yield

        passes.program.around = around
        with torch.no_grad():
            outputs, after = passes.first(passes.body.tensors, carry)
        start = passes.body.state.start() if carry is None else carry
        return [*_TwoPasses.apply(passes, start, begun, outputs, *passes.inputs)], after

    def pullback(
        self, function: Callable[[list[Any]], Any], inputs: list[Any], given: Any = None, program: Any = None
    ) -> tuple[list[Any], Any]:
        again, raw = torch.is_grad_enabled(), {id(parameter) for parameter in (program.raw if program else ())}
        with torch.enable_grad():
            leaves = [
                one if id(one) in raw else one.view_as(one) if again else one.detach().requires_grad_()
                for one in inputs
            ]
            outputs, others = function(leaves)
            pairs = zip(outputs, itertools.repeat(None) if given is None else given)
            roots = [(output, one) for output, one in pairs if output.requires_grad]
            if not roots:
                return [None] * len(inputs), others
            ends, gradients = zip(*roots)
            return [*torch.autograd.grad(ends, leaves, gradients, allow_unused=True, create_graph=again)], others

    def no_gradient_yet(self, weight: Any) -> Any:
        """Nothing: a weight that has no gradient in any micro-batch has none at all."""

    def added(self, total: Any, gradient: Any) -> Any:
        if gradient is None:
            return total
        gradient = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
        return gradient if total is None else total + gradient

    unrecorded = torch.no_grad

    def plainly(self, run: Callable[[], Any]) -> Any:
        return torch._dynamo.disable(run)() if torch.compiler.is_compiling() else run()

    def unprovable(self) -> str:
        return "inside of torch.compile" if torch.compiler.is_compiling() else ""

    def outer_tensors(self, outputs: list[Any], values: list[Any], layer: Any) -> list[tuple[int, ...]]:
        own = {id(value) for value in values}
        if isinstance(layer, torch.nn.Module):
            own |= {id(parameter) for parameter in layer.parameters()}
        leaves = [getattr(node, "variable", None) for node in graph_of(*[output.grad_fn for output in outputs])]
        return [tuple(leaf.shape) for leaf in leaves if leaf is not None and id(leaf) not in own]

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """While this is open, PyTorch's generators are left alone."""
        with torch.random.fork_rng(), torch.enable_grad():
            yield

    # An optimizer's window, whose numbers are on the host: they are known, and gradients are added in place.

    def integers(self, value: Any) -> list[Any]:
        return value.tolist()

    def vector(self, numbers: list[Any], dtype: str) -> Any:
        return torch.tensor(numbers)

    @torch.no_grad()
    def add_up(self, window: Any, gradients: list[Any], rows: Any, weight: int, unit: int) -> None:
        if private.in_stateless_scope():  # what the caller gave stays as it is
            assign(window.sums, [value.clone() for value in values_of(window.sums)])
        plain: list[tuple[Any, Any]] = []
        for total, gradient, variable in zip(values_of(window.sums), gradients, window.variables):
            if not private.is_overwritten(variable):
                plain.append((total, gradient))
            elif gradient is not None:
                total.copy_(torch.maximum(total, gradient.to(total.dtype)))
        plain = [(total, gradient) for total, gradient in plain if gradient is not None]
        if plain:
            torch._foreach_add_(*map(list, zip(*plain)), alpha=weight / unit)

    @torch.no_grad()
    def divided(self, window: Any, weight: int, unit: int) -> list[Any]:
        sums = values_of(window.sums)
        plain = [total for total, variable in zip(sums, window.variables) if not private.is_overwritten(variable)]
        buffer = GradientBuffer(list)
        buffer.attach(lambda: plain)
        run_stages(STAGES, WindowTotal(buffer, weight / unit))  # in place: the sums are emptied next
        return sums

    @torch.no_grad()
    def empty(self, variables: list[Any]) -> None:
        if private.in_stateless_scope():  # where assigning keeps the tensor: these may be the new values of something
            assign(variables, [torch.zeros_like(value) for value in values_of(variables)])
        else:
            torch._foreach_zero_(values_of(variables))

    def host(self) -> Any:
        return keras.device("cpu")
