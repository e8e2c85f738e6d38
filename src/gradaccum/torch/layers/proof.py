"""What a proof that has failed can say of blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gradaccum.errors import NotEquivalentError
from gradaccum.on_torch.memory import is_out_of_memory
from gradaccum.torch.layers.backward_optimizer import BackwardOptimizer
from gradaccum.torch.layers.schedule import Layers

__all__ = ["proof_of"]


@contextlib.contextmanager
def proof_of(layers: Layers | None) -> Iterator[None]:
    """Around a proof: where it fails, say which blocks have left something that backward can't know of."""
    updates = None if layers is None or not isinstance(layers.listener, BackwardOptimizer) else layers.listener
    if layers is not None:
        layers.left.clear()
        layers.failed.clear()
    if updates is not None:
        updates.late = []
    try:
        yield
        failed = {} if layers is None else {p: e for p, e in layers.failed.items() if not is_out_of_memory(e)}
        for path, error in failed.items():
            raise NotEquivalentError(
                f"Backward could not run the block {path!r} again, as `blocks` needs, though its forward pass could "
                f"({type(error).__name__}: {error}). Does it read what the model leaves in an attribute or a global in "
                "each forward pass? Then it has another micro-batch's: hand it to the block as an argument, or leave "
                "out `blocks`."
            ) from error
        if updates is not None and updates.late:
            raise NotEquivalentError(
                f"With update='in_backward' these would be updated before their gradient is complete: "
                f"{', '.join(map(repr, updates.late[:5]))}. A block reads them that comes before their own, and holds "
                "them where they aren't found among its parameters. Register them there, leave the block out of "
                "`blocks`, or use update='after_backward'."
            )
    except NotEquivalentError as error:
        if layers is None or not layers.left:
            raise
        left = ", ".join(f"the block {path!r} ({', '.join(names)})" for path, names in layers.left.items())
        raise NotEquivalentError(
            f"{error}\nThese keep something from a call in attributes: {left}. With `blocks`, what a block gives "
            "to the loss must be among its outputs, as its forward pass has no graph; and what it keeps from one "
            "micro-batch to the next is other rows'."
        ) from error.__cause__
