"""Why a window differs from the large batch: the module, the loss, the input or the buffer, by name."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.core.causes import Leaf, LossFacts, LossSplit, loss_cause, mixing_cause, moving_cause
from gradaccum.core.equivalence import Cause, Difference
from gradaccum.core.proof import Outcome, Way, differences_between
from gradaccum.on_torch.adapter.probes import Outputs, Trace, mixing
from gradaccum.on_torch.batch import Batch, children, leaves, rebuild, with_dims
from gradaccum.torch.batch_norm import batch_norms
from gradaccum.torch.loss import Objective
from gradaccum.torch.proof.trial import Trial

__all__ = [
    "counting_layers",
    "find_causes",
    "hook_cause",
    "input_cause",
    "nondeterminism_cause",
    "suspicion",
    "unusual_batch_norms",
]


def find_causes(
    trial: Trial,
    differences: Sequence[Difference],
    ways: Sequence[Way],
    tolerance: float,
) -> list[Cause]:
    """Every cause that can be told apart in one go, the most certain first."""
    if counted := counting_layers([trial.original.model]):
        return counted
    large = trial.trace(None)
    causes, culprits = _module_causes(trial, large, ways)
    if not causes or any(cause.kind == "error" for cause in causes):
        shared = _shared_input(trial, ways, tolerance)
        if shared is not None:
            return [shared]
    causes += _loss_causes(trial, bool(culprits))
    causes += _buffer_causes(large, differences, culprits, tolerance)
    if not causes:
        causes += _suspects(trial, large)
    return causes or [_unknown(differences, tolerance)]


def _loss_causes(trial: Trial, model_differs: bool) -> list[Cause]:
    """What is wrong with the loss; of several, with each."""
    found = []
    try:
        for name in trial.terms() or [None]:
            trial.term = name
            cause = _loss_cause(trial, model_differs)
            if cause is not None:
                of = "" if trial.term is None else f"Of the loss term {trial.term!r}: "
                found.append(dataclasses.replace(cause, message=of + cause.message))
    finally:
        trial.term = None
    return found


def _loss_cause(trial: Trial, model_differs: bool) -> Cause | None:
    """What is wrong with the loss, judged on the large batch's outputs; on the whole, where the model is innocent."""
    try:
        outputs = trial.outputs()
        cause = _cause_beside(trial, outputs) if outputs.calls else None
        if (not outputs.calls or not outputs.complete) and not model_differs:
            cause = _cause_beside(trial, None)
    except Exception:  # the loss fails on these parts: what fails is named where it fails
        return None
    return cause


def _cause_beside(trial: Trial, outputs: Outputs | None) -> Cause | None:
    """What is wrong with the loss on the large batch's outputs; with None: with model and loss together."""

    def vectors(rows: Tensor | None) -> tuple[list[Tensor], float | None]:
        blocks, weight = trial.raw(rows, outputs)
        return [(block if block.is_complex() else block.double()).cpu() for block in blocks], weight

    splits = []
    for first, second in _splits(trial):
        (whole, _), (a, weight_a), (b, weight_b) = vectors(None), vectors(first), vectors(second)
        splits.append(LossSplit.of((first, second), whole, (a, b), (weight_a, weight_b)))
    if outputs is not None and not outputs.complete:
        return None
    return loss_cause(splits, _facts(trial))


def _facts(trial: Trial) -> LossFacts:
    """What is known of the loss, in the user's words."""
    original, arguments = trial.original, _argument_names(trial.original.compute_loss, trial.batch.tree)

    def weigh(rows: Tensor) -> float:
        weight = original.total(trial.batch.take(rows))
        if isinstance(weight, dict):
            weight = weight.get(trial.term, 0.0)
        return 0.0 if weight is None else float(weight)

    summed = "nothing, being taken for sums" if original.reduction == "sum" else "rows"
    ignored = sorted({-100, -1, 0, *_ignored(original.loss_fn)})
    tensors = [(path, leaf) for path, leaf in leaves(trial.batch.tree) if isinstance(leaf, Tensor) and leaf.dim()]
    return LossFacts(
        original.reduction,
        "what `weight` returns" if original.weight is not None else summed,
        weigh,
        [_leaf(trial, path, leaf, arguments) for path, leaf in tensors if not leaf.is_complex()],
        arguments,
        "Leave `weight` out" if original.weight is not None else "Return the loss alone, or its rows with it",
        "Return (loss, weight) from `compute_loss`, with what the loss divides by.",
        "it is not linear in its mean. Use gradaccum.torch.chunked around the model, which gives the large batch's "
        "gradient for any loss. Where only a few rows belong together, as pairs do, groups= keeps them together.",
        ignored,
        _class_weights(original),
        any("CausalLM" in name or "LMHead" in name for name in map(_kind, original.model.modules())),
    )


def _leaf(trial: Trial, path: str, tensor: Tensor, arguments: Sequence[str]) -> Leaf:
    index, _, rest = path.removeprefix("[").partition("]")

    def take(rows: Tensor) -> Tensor:
        taken = next(leaf for where, leaf in leaves(trial.batch.take(rows).tree) if where == path)
        return taken if taken.is_floating_point() or taken.dtype is torch.bool else taken.long()

    floating, is_bool = tensor.is_floating_point(), tensor.dtype is torch.bool
    return Leaf(
        f"batch{path}",
        arguments[int(index)] + rest if index.isdigit() else "...",
        take,
        "float" if floating else "bool" if is_bool else "whole",
        tensor.dim(),
        None if floating or is_bool else frozenset(tensor.unique().tolist()),
        floating and not bool((tensor >= 0).all()),
    )


def _ignored(loss_fn: Any) -> list[int]:
    found = getattr(loss_fn, "ignore_index", None)
    if isinstance(loss_fn, functools.partial):
        found = loss_fn.keywords.get("ignore_index")
    return [found] if isinstance(found, int) else []


def _class_weights(original: Objective) -> list[tuple[str, Tensor]]:
    """Vectors of weights that the loss refers to, with their names."""
    found: dict[str, Any] = {}
    for function in (original.loss_fn, original.compute_loss):
        while isinstance(function, functools.partial):
            found.update(function.keywords)
            function = function.func
        if isinstance(function, nn.Module):
            found.update({name: buffer for name, buffer in function.named_buffers()})
            found.update({name: value for name, value in vars(function).items() if isinstance(value, Tensor)})
        elif inspect.isfunction(function):
            variables = inspect.getclosurevars(function)
            found.update(variables.globals)
            found.update(variables.nonlocals)
            for name, value in [*variables.globals.items(), *variables.nonlocals.items()]:
                if isinstance(value, nn.Module):
                    found.update({f"{name}.{inner}": buffer for inner, buffer in value.named_buffers()})
    return [
        (name, value.detach().double().cpu())
        for name, value in found.items()
        if isinstance(value, Tensor) and value.dim() == 1 and value.is_floating_point() and (value >= 0).all()
    ]


def _argument_names(compute_loss: Any, batch: tuple[Any, ...]) -> list[str]:
    """What the user calls the batch's parts."""
    default = ["x", "y"] if len(batch) == 2 else ["batch"] if len(batch) == 1 else [f"x{i}" for i in range(len(batch))]
    if not inspect.isfunction(compute_loss):
        return default
    names = [
        name
        for name, p in inspect.signature(compute_loss).parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ][1:]
    return names[: len(batch)] if len(names) >= len(batch) else default


def nondeterminism_cause(trial: Trial, error: float) -> Cause:
    """The large batch differs from itself: name the module, if it is one."""
    found = mixing(trial.trace(None), trial.trace(None), trial.rows)
    where = _where(found[0]) if found else "loss"
    return Cause(
        "nondeterminism",
        where,
        f"The same batch gives another gradient each time, by a relative error of {error:.2g}, with the same random "
        f"state: look at '{where}' for state of its own, or randomness that torch, Python and NumPy don't seed, or try "
        "torch.use_deterministic_algorithms(True).",
    )


# Modules.


def _module_causes(trial: Trial, large: Trace, ways: Sequence[Way]) -> tuple[list[Cause], list[str]]:
    culprits: dict[str, Cause] = {}
    for order, sizes in ways:
        for rows in torch.tensor(order).split(list(sizes)):
            part = trial.trace(rows)
            if part.failed is not None:
                path, error = part.failed
                where = "loss" if path == "loss" else _where(path)
                culprits.setdefault(path, _failure(where, large.kinds.get(path), len(rows), error))
            for path in mixing(large, part, trial.rows, taken=rows):
                culprits.setdefault(path, _mixes(path, large.kinds[path]))
        if culprits:
            break
    return list(culprits.values()), list(culprits)


def _failure(where: str, module: nn.Module | None, rows: int, error: Exception) -> Cause:
    kind = "batch_norm" if isinstance(module, _BatchNorm) else "error"
    shown = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return Cause(
        kind,  # type: ignore[arg-type]  # one of two literals
        where,
        f"'{where}'{_of_type(module)} raises on a micro-batch of {rows} rows, and not on the large batch: "
        f"{type(error).__name__}: {shown}",
    )


def _mixes(path: str, module: nn.Module) -> Cause:
    return mixing_cause(
        _where(path),
        _kind(module),
        batch_norm='Use batch_norm="exact", or GroupNorm.' if isinstance(module, _BatchNorm) else "",
        advice="Compute it per row, or take it out of the model into the loss and use gradaccum.torch.chunked around "
        "what comes before.",
    )


def _suspects(trial: Trial, large: Trace) -> list[Cause]:
    """Modules through which one row reaches another, found by changing a row and by making it NaN."""
    found: list[str] = []
    for batch in _perturbed(trial):
        other = trial.trace(None, batch)
        if other.failed is None:
            found += [path for path in mixing(large, other, trial.rows, changed=0) if path not in found]
    return [_mixes(path, large.kinds[path]) for path in found]


def _perturbed(trial: Trial) -> Iterator[Batch]:
    """The batch with its first row replaced by another row, and with NaN in it."""
    rows = torch.arange(trial.rows)
    for other in (1, trial.rows - 1):
        yield trial.batch.take(torch.where(rows == 0, other, rows))
    dims = iter(trial.batch.described)

    def tainted(leaf: Any) -> Any:
        _, _, dim = next(dims)
        if dim is None or not leaf.is_floating_point():
            return leaf
        leaf = leaf.detach().clone()
        leaf.select(dim, 0).fill_(float("nan"))
        return leaf

    yield trial.batch.map(tainted)


# Inputs.


def input_cause(batch: Any, batch_dims: Any, found: Sequence[tuple[str, Any, int]]) -> Cause:
    """The tensor of a batch whose rows don't match those of the others."""
    counts = [int(leaf.shape[dim]) for _, leaf, dim in found]
    rows = max(sorted(set(counts), reverse=True), key=counts.count)
    path, leaf, dim = next(entry for entry, count in zip(found, counts) if count != rows)
    others = [other for other, size in enumerate(leaf.shape) if size == rows]
    better = others[0] if others else None
    listing = ", ".join(f"batch{p} {tuple(t.shape)}" for p, t, _ in found)
    return Cause(
        "input",
        f"batch{path}",
        f"batch{path} has {leaf.shape[dim]} entries in dimension {dim}, where the other tensors have {rows} rows "
        f"({listing}). {_say_dims(batch, batch_dims, path, better)}",
    )


def _say_dims(batch: Any, batch_dims: Any, path: str, dim: int | None) -> str:
    where = "is shared by all micro-batches" if dim is None else f"has its rows in dimension {dim}"
    return f"If it {where}, say so: batch_dims={_dims_with(batch, batch_dims, path, dim)!r}."


def _dims_with(batch: Any, batch_dims: Any, path: str, dim: int | None, here: str = "") -> Any:
    """`batch_dims` as a prefix tree that says `dim` for the leaf at `path`, and what it said for the others."""
    if here == path:
        return dim
    inside = children(batch)
    if inside is None or not path.startswith(here):
        return batch_dims
    given = children(batch_dims)
    values = []
    for index, (suffix, _, child) in enumerate(inside):
        below = given[index][2] if given is not None else batch_dims
        hit = path == here + suffix or path.startswith((here + suffix + "[", here + suffix + "."))
        values.append(_dims_with(child, below, path, dim, here + suffix) if hit else below)
    return rebuild(batch, values)


def _shared_input(trial: Trial, ways: Sequence[Way], tolerance: float) -> Cause | None:
    """A tensor of the batch that makes the difference: whole for every micro-batch, or split elsewhere, it is exact."""
    batch, dims = trial.batch.tree, trial.batch.batch_dims
    large = trial.run(range(trial.rows), None)
    for path, leaf, dim in trial.batch.leaves[:8]:
        options = [None, *(other for other, size in enumerate(leaf.shape) if other != dim and size == trial.rows)]
        for option in options:
            trying = _dims_with(batch, dims, path, option)
            try:
                if all(entry[2] is None for entry in with_dims(batch, trying)):
                    continue
                outcomes = [trial.run(order, sizes, batch_dims=trying) for order, sizes in ways[:2]]
            except Exception:  # this is no way to split it, then
                continue
            errors = [d.error for outcome in outcomes for d in differences_between(trial, outcome, large)]
            if max(errors) <= tolerance and _others_matter(trial, path, large, tolerance):
                return Cause(
                    "input",
                    f"batch{path}",
                    f"batch{path} is not per-row: split along dimension {dim} it gives another gradient. "
                    f"{_say_dims(batch, dims, path, option)}",
                )
    return None


def _others_matter(trial: Trial, path: str, large: Outcome, tolerance: float) -> bool:
    """Whether the gradient depends on the rows of the other tensors: if not, leaving this one whole splits nothing."""
    rest = Batch(trial.batch.tree, _dims_with(trial.batch.tree, trial.batch.batch_dims, path, None))
    repeated = rest.take(torch.arange(trial.rows).clamp(min=1))
    other = trial.on(repeated).run(range(trial.rows), None)
    return max(difference.error for difference in differences_between(trial, other, large)) > tolerance


# Buffers, and the rest.


def _buffer_causes(
    large: Trace, differences: Sequence[Difference], culprits: Sequence[str], tolerance: float
) -> list[Cause]:
    moved: dict[str, list[str]] = {}
    others = any(d.part != "buffer" and not d.error <= tolerance for d in differences)
    for difference in differences:
        if difference.part == "buffer" and not difference.error <= tolerance:
            moved.setdefault(difference.group, []).append(difference.name.rpartition(".")[2])
    causes = []
    for path, names in moved.items():
        if path in culprits:
            continue
        module = large.kinds.get(path)
        if isinstance(module, _BatchNorm):  # behind a module that mixes rows itself, so that its inputs differ already
            causes.append(_mixes(path, module))
            continue
        causes.append(moving_cause(_where(path), _kind(module), names, decides=others and not culprits))
    return causes


def _unknown(differences: Sequence[Difference], tolerance: float) -> Cause:
    wrong = [d.group for d in differences if d.part == "gradient" and not d.error <= tolerance]
    where = _where(wrong[-1]) if wrong else "loss"
    return Cause(
        "unknown",
        where,
        "The cause was not found: the forward pass agrees row by row in every module that could be compared. The last "
        f"module whose gradient differs is '{where}': look behind it for a custom backward pass, or for state outside "
        "the modules.",
    )


def unusual_batch_norms(model: nn.Module) -> list[Cause]:
    """BatchNorm layers that do more than torch.nn's own."""
    causes = []
    for path, layer in batch_norms(model):
        hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks
        if hooks or type(layer).forward is not nn.BatchNorm1d.forward or nn.utils.parametrize.is_parametrized(layer):
            causes.append(
                Cause(
                    "batch_norm",
                    path or "model",
                    f"'{path or 'model'}' ({type(layer).__name__}) has hooks, parametrizations or a formula of its "
                    'own, which batch_norm="exact" does not follow. Take them off, or use GroupNorm.',
                )
            )
    return causes


def counting_layers(modules: Iterable[nn.Module]) -> list[Cause]:
    """Embeddings that divide the gradient of a row by how often its index occurs among all rows."""
    return [
        Cause(
            "mixes_rows",
            path or "model",
            f"'{path or 'model'}' ({type(layer).__name__}) has scale_grad_by_freq=True, which divides its gradient by "
            "how often an index occurs in the batch: in micro-batches, how often it occurs in each. Leave it at False.",
        )
        for module in modules
        for path, layer in module.named_modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.scale_grad_by_freq and layer.weight.requires_grad
    ]


def hook_cause(parameter: str) -> Cause:
    """A hook on the gradient of this parameter."""
    return Cause(
        "hook",
        parameter,
        f"Parameter '{parameter}' has a hook on its gradient that is not linear: it is called once per micro-batch, "
        "with a part of the gradient. Use clip_grad_norm, or do it in a step pre-hook of the optimizer, which sees the "
        "finished gradient.",
    )


def suspicion(roots: Mapping[str, nn.Module], wrong: Sequence[Difference]) -> Cause:
    """What may make a difference that a copy in float64 doesn't show."""
    hooked = [
        name
        for prefix, root in roots.items()
        for name, p in root.named_parameters(prefix=prefix)
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
    ]
    concerned = [d.name for d in wrong if d.part == "gradient" and d.name in hooked]
    if concerned:
        return hook_cause(concerned[0])
    where = next((d.name for d in wrong if d.part == "gradient"), "loss")
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


def _splits(trial: Trial) -> list[tuple[Tensor, Tensor]]:
    """Two ways to cut the rows in two, of unequal sizes, none of them through rows that belong together."""
    units = trial.batch.units()
    count = len(units)
    cuts = sorted({max(1, count // 3), max(1, count - count // 4 - 1)})
    generator = torch.Generator().manual_seed(1)
    splits = []
    for cut in cuts if len(cuts) > 1 else cuts * 2:
        order = torch.randperm(count, generator=generator).tolist()
        first, second = (torch.cat([units[place] for place in sorted(part)]) for part in (order[:cut], order[cut:]))
        splits.append((first, second))
    return splits


def _where(path: str) -> str:
    return path or "model"


def _kind(module: nn.Module | None) -> str:
    return "" if module is None else type(module).__name__


def _of_type(module: nn.Module | None) -> str:
    return f" ({_kind(module)})" if module is not None else ""
