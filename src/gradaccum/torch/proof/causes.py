"""Why a window differs from the large batch: the module, the loss, the input or the buffer, by name."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.core.causes import LossFacts, LossSplit, halves, loss_cause, mixing_cause, moving_cause, shared_input
from gradaccum.core.equivalence import Cause, Difference
from gradaccum.core.numpy_arrays import leaf_of
from gradaccum.core.proof import Runner
from gradaccum.core.ways import Way
from gradaccum.on_torch.adapter.probes import Trace, mixing, part_differs
from gradaccum.on_torch.batch import Batch, children, rebuild
from gradaccum.on_torch.reach import Reach
from gradaccum.torch.loss import Objective
from gradaccum.torch.proof.trial import Trial


def find_causes(trial: Trial, differences: Sequence[Difference], ways: Sequence[Way], tolerance: float) -> list[Cause]:
    """Every cause that can be told apart in one go, the most certain first."""
    if counted := counting_layers([trial.original.model]):
        return counted
    if trial.rng.seeded:
        return [_seeded(trial)]
    large = trial.trace(None)
    culprits = _module_causes(trial, large, ways)
    causes = list(culprits.values())
    if not causes or any(cause.kind == "error" for cause in causes):
        shared = shared_input(_dims_to_try(trial), ways, tolerance) if ways else None
        if shared is not None:
            path, dim, option = shared
            what = f"batch{path} is not per-row: split along dimension {dim} it gives another gradient. "
            return [Cause("input", f"batch{path}", what + _say_dims(trial.batch, path, option))]
    wrong = [difference for difference in differences if not difference.error <= tolerance]
    # Where a module is wrong, the loss is given other outputs; where its value is right, the gradient is the model's.
    if not culprits and any(difference.part == "loss" for difference in wrong):
        causes += _loss_causes(trial)
    causes += _buffer_causes(large, wrong, culprits)
    return causes or [_unknown(wrong)]


# Losses.


def _loss_causes(trial: Trial) -> list[Cause]:
    """What is wrong with the loss, or with each of several, judged together with the model, which is innocent."""
    found = []
    for term in trial.terms() or [None]:
        try:
            splits = [LossSplit(parts, functools.partial(trial.raw, term)) for parts in _halves(trial.batch)]
        except Exception:  # the loss fails on these parts: what fails is named where it fails
            continue
        if (cause := loss_cause(splits, _facts(trial, term))) is not None:
            of = "" if term is None else f"Of the loss term {term!r}: "
            found.append(dataclasses.replace(cause, message=of + cause.message))
    return found


def _halves(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Two ways to cut the rows in two, of unequal sizes."""
    units = [unit.tolist() for unit in batch.units()]
    return halves(units, [max(1, len(units) // 3), max(1, len(units) - len(units) // 4 - 1)])


def _facts(trial: Trial, term: Any) -> LossFacts:
    """What is known of the loss, in the user's words."""
    original, arguments = trial.original, _argument_names(trial.original.compute_loss, trial.batch.tree)

    def weigh(rows: Sequence[int]) -> float:
        weight = original.total(trial.batch.take(torch.tensor(rows)))
        weight = weight.get(term, 0.0) if isinstance(weight, dict) else weight
        return 0.0 if weight is None else float(weight)

    def code(path: str) -> str:
        index, _, rest = path.removeprefix("[").partition("]")
        return arguments[int(index)] + rest if index.isdigit() else "..."

    function = original.loss_fn
    partial = function.keywords if isinstance(function, functools.partial) else {}
    index = partial.get("ignore_index", getattr(function, "ignore_index", None))
    summed = "nothing, because they were treated as sums" if original.reduction == "sum" else "rows"
    kinds = [type(module).__name__ for module in original.model.modules()]
    return LossFacts(
        original.reduction,
        "what `weight` returns" if original.weight is not None else summed,
        weigh,
        [
            leaf_of(f"batch{path}", code(path), leaf.detach().movedim(dim, 0).cpu().double().numpy())
            if leaf.is_floating_point()
            else leaf_of(f"batch{path}", code(path), leaf.movedim(dim, 0).cpu().numpy())
            for path, leaf, dim in trial.batch.leaves
            if isinstance(leaf, Tensor) and not leaf.is_complex()
        ],
        arguments,
        "Leave `weight` out" if original.weight is not None else "Return the loss alone, or its rows with it",
        "Return (loss, weight) from `compute_loss`, with what the loss divides by.",
        "it is not linear in its mean. Use gradaccum.torch.chunked around the model, which gives the large batch's "
        "gradient for any loss. Where only a few rows belong together, as pairs do, groups= keeps them together.",
        sorted({-100, -1, 0, *([index] if isinstance(index, int) else [])}),
        _class_weights(original),
        any("CausalLM" in kind or "LMHead" in kind for kind in kinds),
    )


def _class_weights(original: Objective) -> list[tuple[str, Any]]:
    """Vectors of weights that the loss refers to, with their names."""
    found: list[tuple[str, Any]] = []
    reached = Reach(original.loss_fn, original.compute_loss)
    held: list[tuple[str, dict[str, Any]]] = [(name, {"": tensor}) for name, tensor in reached.tensors]
    for name, module in reached.modules.items():
        held.append((name, {**vars(module), **dict(module.named_buffers())}))
    for name, inner in held:
        for own, one in inner.items():
            if isinstance(one, Tensor) and one.dim() == 1 and one.is_floating_point() and (one >= 0).all():
                found.append((f"{name}.{own}".strip("."), one.detach().double().cpu().numpy()))
    return found


def _argument_names(compute_loss: Any, batch: tuple[Any, ...]) -> list[str]:
    """What the user calls the batch's parts."""
    if inspect.isfunction(compute_loss):
        parameters = inspect.signature(compute_loss).parameters.items()
        names = [name for name, p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
        if len(names) >= len(batch):
            return names[: len(batch)]
    return {1: ["batch"], 2: ["x", "y"]}.get(len(batch), [f"x{i}" for i in range(len(batch))])


# Modules.


def _module_causes(trial: Trial, large: Trace, ways: Sequence[Way]) -> dict[str, Cause]:
    """The modules that mix rows, or fail on a micro-batch, by path."""
    culprits: dict[str, Cause] = {}
    for order, sizes in ways:
        for rows in torch.tensor(order).split(list(sizes)):
            part = trial.trace(rows)
            if part.failed is not None:
                path, error = part.failed
                culprits.setdefault(path, _failure(path, large.kinds.get(path), len(rows), error))
            for path in mixing(large, part, part_differs(trial.rows, rows), sums=False):
                culprits.setdefault(path, _mixes(path, large.kinds[path]))
        if culprits:
            break
    return culprits


def _failure(path: str, module: nn.Module | None, rows: int, error: Exception) -> Cause:
    of_type = f" ({type(module).__name__})" if module is not None else ""
    message = (
        f"'{path or 'model'}'{of_type} raises on a micro-batch of {rows} rows, and not on the large batch: "
        f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    )
    return Cause("batch_norm" if isinstance(module, _BatchNorm) else "error", path or "model", message)


def _mixes(path: str, module: nn.Module) -> Cause:
    return mixing_cause(
        path or "model",
        type(module).__name__,
        batch_norm='Use batch_norm="exact", or GroupNorm.' if isinstance(module, _BatchNorm) else "",
        advice="Compute it per row, or take it out of the model into the loss and use gradaccum.torch.chunked around "
        "what comes before.",
    )


def counting_layers(modules: Iterable[nn.Module]) -> list[Cause]:
    """Embeddings that divide the gradient of a row by how often its index occurs among all rows."""
    return [
        Cause(
            "mixes_rows",
            path or "model",
            f"'{path or 'model'}' ({type(layer).__name__}) has scale_grad_by_freq=True, which divides its gradient by "
            "how often an index occurs in the batch; a micro-batch sees only its own share. Set it to False.",
        )
        for module in modules
        for path, layer in module.named_modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.scale_grad_by_freq and layer.weight.requires_grad
    ]


def nondeterminism_cause(trial: Trial, error: float) -> Cause:
    """The large batch differs from itself: name the module, if it is one."""
    found = mixing(trial.trace(None), trial.trace(None))
    where = (found[0] or "model") if found else "loss"
    return Cause(
        "nondeterminism",
        where,
        f"The same batch gives another gradient each time, by a relative error of {error:.2g}, with the same random "
        f"state: look at '{where}' for state of its own, or randomness that torch, Python and NumPy don't seed, or try "
        "torch.use_deterministic_algorithms(True).",
    )


def _seeded(trial: Trial) -> Cause:
    how = "under torch.random.fork_rng()" if trial.rng.seeded_by_forks else "of a generator that it seeds itself"
    return Cause(
        "randomness",
        "loss",
        f"The loss or the model draws random numbers {how}, so every micro-batch draws those of the first rows again. "
        "Make them for the whole batch before the step, and pass them as part of it, or draw them of PyTorch's own "
        "generator.",
    )


# Inputs.


def input_cause(batch: Batch) -> Cause | None:
    """The tensor of a batch whose rows don't match those of the others, if there is one."""
    counts = [int(leaf.shape[dim]) for _, leaf, dim in batch.leaves]
    if len(set(counts)) <= 1:
        return None
    rows = max(sorted(set(counts), reverse=True), key=counts.count)
    path, leaf, dim = next(entry for entry, count in zip(batch.leaves, counts) if count != rows)
    better = next((other for other, size in enumerate(leaf.shape) if size == rows), None)
    listing = ", ".join(f"batch{p} {tuple(t.shape)}" for p, t, _ in batch.leaves)
    return Cause(
        "input",
        f"batch{path}",
        f"batch{path} has {leaf.shape[dim]} entries in dimension {dim}, where the other tensors have {rows} rows "
        f"({listing}). {_say_dims(batch, path, better)}",
    )


def _say_dims(batch: Batch, path: str, dim: int | None) -> str:
    where = "is shared by all micro-batches" if dim is None else f"has its rows in dimension {dim}"
    return f"If it {where}, say so: batch_dims={_dims_with(batch.tree, batch.batch_dims, path, dim)!r}."


def _dims_with(tree: Any, batch_dims: Any, path: str, dim: int | None, here: str = "") -> Any:
    """`batch_dims` as a prefix tree that says `dim` for the leaf at `path`, and what it said for the others."""
    inside = children(tree)
    if here == path or inside is None:
        return dim if here == path else batch_dims
    given = children(batch_dims)
    values = []
    for index, (suffix, _, child) in enumerate(inside):
        below, where = given[index][2] if given is not None else batch_dims, here + suffix
        hit = path == where or path.startswith((where + "[", where + "."))
        values.append(_dims_with(child, below, path, dim, where) if hit else below)
    return rebuild(tree, values)


def _dims_to_try(trial: Trial) -> Iterator[tuple[tuple[str, int, int | None], Callable[[], Runner]]]:
    """Other dimensions for the tensors of the batch, the first of them, and how to run with these."""
    batch = trial.batch
    for path, leaf, dim in batch.leaves[:8]:
        for option in (None, *(n for n, size in enumerate(leaf.shape) if n != dim and size == trial.rows)):
            trying = _dims_with(batch.tree, batch.batch_dims, path, option)
            yield (path, dim, option), functools.partial(lambda dims: trial.on(Batch(batch.tree, dims)), trying)


# Buffers, and the rest. `wrong` is what differs by more than rounding.


def _buffer_causes(large: Trace, wrong: Sequence[Difference], culprits: Mapping[str, Cause]) -> list[Cause]:
    moved: dict[str, list[str]] = {}
    for difference in wrong:
        if difference.part == "buffer" and difference.group not in culprits:
            moved.setdefault(difference.group, []).append(difference.name.rpartition(".")[2])
    decides = not culprits and any(difference.part != "buffer" for difference in wrong)
    causes = []
    for path, names in moved.items():
        module = large.kinds.get(path)
        if isinstance(module, _BatchNorm):  # behind a module that mixes rows itself, so that its inputs differ already
            causes.append(_mixes(path, module))
        else:
            kind = "" if module is None else type(module).__name__
            causes.append(moving_cause(path or "model", kind, names, decides=decides))
    return causes


def _unknown(wrong: Sequence[Difference]) -> Cause:
    groups = [difference.group for difference in wrong if difference.part == "gradient"]
    where = (groups[-1] or "model") if groups else "loss"
    return Cause(
        "unknown",
        where,
        "The cause was not found: the forward pass agrees row by row in every module that could be compared. The last "
        f"module whose gradient differs is '{where}': look after it for a custom backward pass, or for state outside "
        "the modules.",
    )


def hook_cause(parameter: str) -> Cause:
    """A hook on the gradient of this parameter."""
    return Cause(
        "hook",
        parameter,
        f"Parameter '{parameter}' has a hook on its gradient that is not linear: it is called once per micro-batch, "
        "with a part of the gradient. Use clip_grad_norm, or do it in a step pre-hook of the optimizer, which sees the "
        "finished gradient.",
    )


def updating_hook(parameters: Mapping[str, Tensor]) -> Cause | None:
    """A hook on a parameter's gradient whose code steps an optimizer, as in "optimizer step in backward"."""
    known: set[int] = set()
    for name, parameter in parameters.items():
        for hook in hooks_of(parameter):
            code = id(getattr(hook, "__code__", hook))
            if code in known:
                continue
            known.add(code)
            reach = Reach(hook)
            if reach.optimizers and reach.names("step"):
                return Cause(
                    "hook",
                    name,
                    f"A hook on the gradient of {name!r} steps an optimizer ({type(reach.optimizers[0][1]).__name__}) "
                    "in every backward pass, so once per micro-batch, with a part of the gradient. Remove the hooks, "
                    "and give TrainStep the optimizer, or a list of them.",
                )
    return None


def hooks_of(parameter: Tensor) -> list[Any]:
    """The users' own hooks on the gradient of a parameter."""
    kinds = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
    hooks = [hook for hooks in kinds for hook in (hooks or {}).values()]
    return [hook for hook in hooks if not (getattr(hook, "__module__", "") or "").startswith(("torch.", "gradaccum."))]


def updated_cause(names: Sequence[str]) -> Cause:
    """Parameters that changed in a backward pass."""
    shown = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
    return Cause(
        "hook",
        names[0],
        f"Backward passes change these parameters, as an optimizer in a hook does: {shown}. Every micro-batch would. "
        "Remove the hooks, and give TrainStep the optimizer, or a list of them.",
    )


def suspicion(wrong: Sequence[Difference]) -> Cause:
    """What may make a difference that a copy in float64 doesn't show."""
    names = [difference.name for difference in wrong if difference.part == "gradient"]
    where = names[0] if names else "loss"
    return Cause(
        "unknown",
        where.rpartition(".")[0] or where,
        "The cause was not found. It may be one of these:\n"
        "- A mean over something else than rows (tokens, unmasked pixels): pass its count, weight=lambda *micro_batch: "
        "..., or return (loss, weight) from `compute_loss`.\n"
        '- A sum over rows: pass reduction="sum".\n'
        "- A model or a loss that compares rows with each other: wrap the encoder in "
        "gradaccum.torch.chunked(model, micro_batch_size) and keep your own loop.\n"
        "- State outside the modules, or a backward pass of its own.",
    )
