"""Which updates of `fit` and `train_on_batch` are to be proved."""

from __future__ import annotations

from typing import Any

from gradaccum.core.proof_schedule import ProofSchedule
from gradaccum.keras.backends.base import kind_of, unpack


class UpdatesToProve:
    """Updates 1, 2, 4, 8, ... since the model was compiled, the first of each `fit`, and batches of a new kind."""

    def __init__(self, model: Any) -> None:
        self.model, self.schedule = model, ProofSchedule()
        self._wanted = self._seen = False
        self._proven: set[str] = set()

    def begin(self, is_new: bool) -> None:
        """The training function is asked for, made anew or as it is: by a `fit`, if no batch comes by itself."""
        if is_new:
            self.schedule = ProofSchedule()
        self._wanted, self._seen = self._wanted or not self._seen, False

    def see(self, data: Any) -> None:
        """This batch comes next, by itself."""
        self._seen = True
        self._wanted = self._wanted or self._kind(data) not in self._proven

    def includes(self, updates: int) -> bool:
        """Whether one of the next updates, so many, is to be proved."""
        return any([*map(self.schedule.is_due, [False] * updates)]) or self._wanted

    def remember(self, data: Any) -> None:
        """The update of this batch is being proved."""
        self._wanted = False
        self._proven.add(self._kind(data))

    def forget(self) -> None:
        """The model has other losses: batches of each kind are new."""
        self._proven = set()

    def _kind(self, batch: Any) -> str:
        return f"{len(self.model.trainable_variables)} {kind_of(unpack(batch))}"
