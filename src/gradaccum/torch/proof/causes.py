"""Why a window differs from the large batch: the module, the loss, the input or the buffer, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.core.equivalence import Cause, Difference
from gradaccum.core.proof import Outcome, Way, differences_between
from gradaccum.on_torch.adapter.probes import Trace, mixing
from gradaccum.on_torch.batch import Batch, children, rebuild, with_dims
from gradaccum.torch.batch_norm import batch_norms
from gradaccum.torch.proof.loss_causes import loss_cause
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
    """Every cause that can be told apart in one go, the most certain first.

    Args:
        trial: The copy to try it on.
        differences: What differs.
        ways: Cuts in which it does, the worst first.
        tolerance: The largest relative error that counts as rounding.
    """
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
        cause = loss_cause(trial, _splits(trial), outputs) if outputs.calls else None
        if (not outputs.calls or not outputs.complete) and not model_differs:
            cause = loss_cause(trial, _splits(trial), None)
    except Exception:  # the loss fails on these parts: what fails is named where it fails
        return None
    return cause


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
    where = _where(path)
    if isinstance(module, _BatchNorm):
        return Cause(
            "batch_norm",
            where,
            f"'{where}' is a {type(module).__name__}: it normalises each micro-batch by itself. Use "
            'batch_norm="exact", or GroupNorm.',
        )
    return Cause(
        "mixes_rows",
        where,
        f"'{where}'{_of_type(module)} mixes rows: what it returns for a row depends on the other rows of the "
        "micro-batch (a batch statistic, detached or not, a ranking or a capacity over the batch). Compute it per row, "
        "or take it out of the model into the loss and use gradaccum.torch.chunked around what comes before.",
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
    """The tensor of a batch whose rows don't match those of the others.

    Args:
        batch: The batch as the user has it.
        batch_dims: Where the rows were looked for.
        found: The leaves that carry rows: path, tensor, dimension.
    """
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
        causes.append(
            Cause(
                "buffer",
                _where(path),
                f"'{_where(path)}'{_of_type(module)} moves its buffers ({', '.join(names)}) in every forward pass: "
                "once per micro-batch, not once per update. "
                + (
                    "What it returns depends on them, so later micro-batches are computed with others than the large "
                    "batch. Move them once per update (one pass in train mode after the optimizer's step, the rest in "
                    "eval mode), or do without."
                    if others and not culprits
                    else "Where that matters, move them once per update, after the optimizer's step."
                ),
            )
        )
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
    """What may make a difference that a copy in float64 doesn't show.

    Args:
        roots: The modules, by the prefix of their names.
        wrong: What differs.
    """
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


def _of_type(module: nn.Module | None) -> str:
    return f" ({type(module).__name__})" if module is not None else ""
