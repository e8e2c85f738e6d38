"""Which batches of a TrainStep are proven: all that an ordinary update runs of its proof."""

from __future__ import annotations

from gradaccum.core.proof_schedule import ATTEMPTS, ProofSchedule
from gradaccum.on_torch.adapter.kinds import BatchKinds
from gradaccum.on_torch.batch import Batch


class BatchSchedule(ProofSchedule):
    """The first batch of each kind, and the 2nd, 4th, 8th, ... of all, where rows can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.attempts = BatchKinds(), 0
        """The kinds that have been proven; and proofs since then, none of which had anything to compare."""

    def includes(self, batch: Batch, modes: list[bool], text: frozenset[str] = frozenset()) -> bool:
        """Whether this batch, with modules in these modes, is to be proven."""
        if batch.rows < 2 or self.attempts >= ATTEMPTS or (batch.groups is not None and len(batch.units()) < 2):
            self.batches += 1
            return False
        return self.is_due(self.kinds.is_new(batch, modes, text))

    def proven(self) -> None:
        """The latest batch's kind is known from now on."""
        self.kinds.add()
        self.attempts = 0
