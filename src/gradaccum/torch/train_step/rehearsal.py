"""Windows of proofs: the passes of a window, of this rank alone. Nothing is clipped, measured or learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from gradaccum.core.sizes import Plan
from gradaccum.on_torch.batch import Batch
from gradaccum.on_torch.stages import gradient_stages
from gradaccum.torch.loss import Objective
from gradaccum.torch.train_step.passes import TrainPasses
from gradaccum.torch.train_step.window import WindowRunner


class Rehearsal(WindowRunner):
    """Runs few rows as a window would. `alone`: the model, without what joins ranks."""

    def __init__(self, objective: Objective, *arguments: Any, alone: nn.Module, **keywords: Any) -> None:
        super().__init__(objective, *arguments, **keywords)
        self._objective, self._model = objective, alone
        self.stages = gradient_stages({"accumulate_dtype": self.buffer.dtype})

    def run_passes(self, batch: Batch, plan: Plan, passes: TrainPasses) -> None:
        for piece in plan:  # a proof takes fewer rows where these don't fit
            passes.both(piece)

    def rehearse(
        self, objective: Objective, batch: Batch, sizes: Sequence[int] | None, scaler: Any, *, known: bool = False
    ) -> Tensor:
        """Returns the loss. `known`: which modules there are has been looked up for the proof before."""
        self.objective = objective.on(self._model)
        self.scaler, self.state.always = scaler, not known
        self.state.open()
        try:
            return self.run(batch, sizes).loss
        finally:
            self.state.forget(modules=not known)
            self.objective = self._objective
