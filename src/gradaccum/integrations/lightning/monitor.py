"""Watch a window of Lightning's: gradients between backward passes, parameters and hyperparameters until its update."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gradaccum.torch.distributed import Settings
from gradaccum.torch.watch import GradientMonitor, Modification, Values, counts_versions


class PassMonitor(GradientMonitor):
    """Watches gradients of a loop that tells when a pass begins and ends: between passes nothing may change.

    So it needs hooks in windows 1, 2, 4, 8, ... alone.
    """

    def close(self) -> None:
        super().close()
        if not self.looking:
            for hook in self._watched.hooks:
                hook.remove()
            self._watched.hooks = []

    def counted(self, last_next: bool = False) -> None:
        """A pass has ended. One that wrote twice to a gradient may have edited it: the next ones are looked at."""
        watched = self._watched
        if not self.looking:
            for parameter, gradient, version in zip(watched.parameters, watched.gradients, watched.bases):
                if gradient is not None and parameter.grad is gradient and gradient._version > version + 1:
                    if counts_versions(gradient):
                        self.watch_all()
                    break
        super().counted(last_next)

    def update_is_over(self) -> None:
        """A window's first batch is here: what clipping and the optimizer have left is not to join its sum."""
        self._watched.restart(closed=True)

    def before_pass(self, first: bool) -> Modification | None:
        """What was done to the gradients since the pass before; or, before the window's first, what was not."""
        if not first:
            # Hooks have counted what came by a backward pass that isn't the loop's.
            return "edited" if self.looking and self.passes.arrivals else self.modification()
        left = self._is_left()
        self.restart()
        return "left" if left else None

    def _is_left(self) -> bool:
        """Whether the sum begins with something. In most windows only what the update has left shows."""
        watched = self._watched
        if self.looking:
            return any(p.grad is not None and bool(p.grad.norm() != 0) for p in watched.parameters)
        assert watched.left is not None
        for parameter, gradient, version in zip(watched.parameters, *watched.left):
            if gradient is not None and parameter.grad is gradient and gradient._version == version:
                return counts_versions(gradient)
        return False


class Opened:
    """The optimizer as a window opened: its micro-batches belong to these parameters, its update to these settings."""

    def __init__(self, settings: Settings, parameters: Callable[[], list[Tensor]]) -> None:
        self._settings, self._parameters = settings, parameters
        self._hyperparameters, self._values = settings.hyperparameters(wait=False), self._values_now()

    def changed_settings(self) -> list[str]:
        """Hyperparameters that are others now; said once."""
        pairs = zip(self._hyperparameters, self._settings.hyperparameters(wait=False), strict=False)
        changed = {n: f"{n} from {old[n]} to {new.get(n)}" for old, new in pairs for n in old if old[n] != new.get(n)}
        if changed:
            self._hyperparameters = []
        return [*changed.values()]

    def parameters_changed(self) -> bool:
        """Whether they have other values now; swapped for a validation and back, they have not."""
        return self._values is not None and self._values.differ(self._values_now())

    def _values_now(self) -> Values | None:
        return Values.of([p.detach() for p in self._parameters() if p.is_floating_point() and Values.has(p)])
