"""Is the loss additive over rows? Asked once, of a few rows, before the first update is made with it.

A batch's loss must be what its parts add up to with their weights. A loss that compares rows with each other
(contrastive losses, Dice, batch-hard triplets) or divides by something else than its weight (token means weighed by
rows) is not.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.on_torch.random_state import RandomState, torch_generators
from gradaccum.on_torch.transaction import as_found
from gradaccum.torch.batch_norm import batch_norms
from gradaccum.torch.loss.accumulator import LossAccumulator
from gradaccum.torch.loss.objective import Objective

__all__ = ["same_gradient", "undisturbed", "verify_additivity"]

logger = logging.getLogger("gradaccum")

ROWS = 8
"""Rows of the batch that are looked at."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative differences that rounding may make, with room for other kernels at other sizes."""
ON_DEVICES = 5e-3
"""The same for float32 on accelerators, whose products may be of 10 bits (TF32)."""
HALF_PRECISION = 5e-2


def verify_additivity(objective: Objective, batch: Batch) -> None:
    """Compare the loss on a few rows with what its parts add up to, in evaluation mode.

    Judges the loss alone: dropout is off, BatchNorm uses its running statistics. Leaves out what it cannot evaluate: a
    loss that needs more rows, or that is random. Moves no random number, no buffer and no gradient.

    Raises:
        NotEquivalentError: They differ, beyond rounding.
    """
    if batch.rows < 2:
        return
    order = _order(batch)
    half = len(order) // 2
    # The extremes apart show wrong weights best; a loss that needs all kinds of rows in every part gets them mixed.
    splits = [(order[:half], order[half:]), (order[::2], order[1::2])]
    with undisturbed(objective):
        if batch_norms(objective.model):  # without running statistics, BatchNorm looks across rows in any mode
            return
        for parts in splits:
            try:
                whole, added, weights = _compare(objective, batch, torch.cat(parts), parts)
            except Exception as error:
                if not is_out_of_memory(error):
                    logger.debug("The loss could not be evaluated on parts of a batch: %s", error)
                continue
            if weights is not None:
                raise NotEquivalentError(
                    f"The weights of two parts must add up to the weight of both. Received: {weights[0]:g} and "
                    f"{weights[1]:g} for parts of {[len(part) for part in parts]} rows, {weights[2]:g} for both. "
                    "A weight is a number of rows, of tokens, or a sum over them."
                )
            if whole is not None and added is not None:
                _judge(objective, whole, added, [len(part) for part in parts])
                return


def _compare(
    objective: Objective, batch: Batch, rows: Tensor, parts: tuple[Tensor, ...]
) -> tuple[Tensor | None, Tensor | None, tuple[float, ...] | None]:
    """The loss on these rows, the sum over its parts, and the weights where they do not add up."""
    few = batch.take(rows)
    if objective.weight is not None:
        weights = tuple(float(objective.weight(*batch.take(part).tree)) for part in (*parts, rows))
        if abs(weights[0] + weights[1] - weights[2]) > 1e-4 * abs(weights[2]):
            return None, None, weights
    before = RandomState(torch_generators([objective.device]))
    whole = objective.whole(few).detach()
    window = LossAccumulator(objective, few)
    for part in parts:
        window.add(window.forward(batch.take(part)))
    if before.moved() or window.empty or not (whole.isfinite() & window.loss.isfinite()):
        return None, None, None
    return whole, window.loss, None


def same_gradient(objective: Objective, batch: Batch, other: Batch) -> bool | None:
    """Whether two batches have the same gradient, up to rounding; None where there is nothing to compare."""
    loss, expected = _gradient(objective, batch)
    _, again = _gradient(objective, batch)
    if not loss.isfinite() or _far(objective, expected, again, loss):  # random
        return None
    return not _far(objective, expected, _gradient(objective, other)[1], loss)


def _gradient(objective: Objective, batch: Batch) -> tuple[Tensor, list[Tensor | None]]:
    loss = objective.whole(batch)
    parameters = [p for p in objective.model.parameters() if p.requires_grad]
    return loss.detach(), list(torch.autograd.grad(loss, parameters, allow_unused=True))


def _far(objective: Objective, expected: list[Tensor | None], actual: list[Tensor | None], loss: Tensor) -> bool:
    zero = loss.new_zeros(())
    pairs = [(zero if a is None else a, zero if b is None else b) for a, b in zip(expected, actual, strict=True)]
    largest = max(float(a.abs().max()) for a, _ in pairs)
    return max(float((a - b).abs().max()) for a, b in pairs) > _tolerance(objective, loss) * largest


def _relative_error(loss: Tensor, other: Tensor) -> float:
    return float((other - loss).abs() / loss.abs().clamp_min(1e-3))


def _judge(objective: Objective, whole: Tensor, added: Tensor, sizes: list[int]) -> None:
    error, tolerance = _relative_error(whole, added), _tolerance(objective, whole)
    if error <= tolerance:
        return
    raise NotEquivalentError(
        f"The losses of micro-batches do not add up to the large batch's loss: on {sum(sizes)} rows of this batch "
        f"it is {float(whole):.6g}, and {float(added):.6g} when put together from {sizes[0]} and {sizes[1]} of them "
        f"(relative difference {error:.1e}, {tolerance:.0e} allowed).\n"
        "- A mean over something else than rows (tokens, unmasked pixels): pass its count, weight=lambda *micro_batch: "
        "..., or return (loss, weight) from `compute_loss`.\n"
        '- A sum over rows: pass reduction="sum".\n'
        "- A loss that compares rows with each other (contrastive, triplets, Dice): micro-batches cannot give its "
        "gradient. Wrap the encoder in gradaccum.torch.chunked(model, micro_batch_size) and keep your own loop.\n"
        "- A term that is no mean over rows (a regulariser): see the documentation of TrainStep.\n"
        "verify=False leaves this check out."
    )


def _tolerance(objective: Objective, loss: Tensor) -> float:
    dtypes = {loss.dtype, *(p.dtype for p in objective.model.parameters())}
    if objective.autocast is not None or dtypes & {torch.float16, torch.bfloat16}:
        return HALF_PRECISION
    if torch.float32 in dtypes:
        return TOLERANCES[torch.float32] if loss.device.type == "cpu" else ON_DEVICES
    return TOLERANCES.get(loss.dtype, HALF_PRECISION)


def _order(batch: Batch) -> Tensor:
    """A few rows, sorted so that those with the least that counts (padding, ignored targets) come first."""
    scores = torch.zeros(batch.rows, dtype=torch.float64)
    for _, leaf, dim in batch.leaves:
        values = torch.as_tensor(leaf).detach().movedim(dim, 0)
        if values.is_floating_point() or values.is_complex():
            continue
        if values.ndim == 1:
            scores += values.cpu().double() / (1.0 + values.abs().max().item())
        else:
            scores += ((values != 0) & (values != -100)).flatten(1).sum(1).cpu()
    order = scores.argsort(stable=True)
    if len(order) <= ROWS:
        return order
    return torch.cat([order[: ROWS // 2], order[-ROWS // 2 :]])


@contextlib.contextmanager
def undisturbed(objective: Objective) -> Iterator[None]:
    """Evaluation mode, eager, without the wrapper that exchanges gradients; everything as before afterwards."""
    model = objective.model
    modules = [m for root in (model, objective.loss_fn) if isinstance(root, nn.Module) for m in root.modules()]
    modes = [(module, module.training) for module in modules]
    wrapped = getattr(model, "module", None) if isinstance(model, nn.parallel.DistributedDataParallel) else None
    try:
        if wrapped is not None:
            objective.model = wrapped
        for module in modules:
            module.training = False
        found = as_found(modules, objective.device)
        with found, torch.compiler.set_stance("force_eager"), torch.enable_grad():
            yield
    finally:
        objective.model = model
        for module, training in modes:
            module.training = training
