"""Records a training run, one JSON line per update, and turns it into a report."""

from __future__ import annotations

import datetime
import importlib.util
import logging
import math
import os
import pathlib
import time
from typing import Any, TextIO

import torch
from torch import Tensor

import gradaccum
from gradaccum.on_torch.memory import MemoryMeter
from gradaccum.report import Report
from gradaccum.report.run import Run, encode, read

logger = logging.getLogger("gradaccum")

_NOISE_EVERY = 20
"""Updates between two readings of the noise scale, which looks back on hundreds of windows."""


class Recorder:
    """Writes a line for each update: loss, gradient norm, micro-batch size, seconds, peak memory, noise scale.

    The file is complete after every line, so a killed run keeps its lines. An existing file is continued. Reading the
    loss waits for the device, once per update.

    Args:
        path: The file of JSON lines; its folder is made.
        source: The `TrainStep`, the `BlockStep` or the wrapped optimizer that makes the updates.
        tensorboard: A folder for TensorBoard. If TensorBoard isn't installed, this is logged.

    Raises:
        TypeError: `source` is none of these.
        OSError: The file can't be written.

    Example:
        >>> import tempfile
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = gradaccum.torch.TrainStep(model, optimizer, loss_fn=torch.nn.MSELoss(), micro_batch_size=4)
        >>> with tempfile.TemporaryDirectory() as folder, Recorder(f"{folder}/run.jsonl", step) as recorder:
        ...     for _ in range(3):
        ...         loss = step(torch.randn(8, 3), torch.randn(8, 1))
        ...         recorder.record(loss)
        ...     _ = recorder.report().save(f"{folder}/run.html")
        True
        True
        True
    """

    def __init__(
        self, path: str | os.PathLike[str], source: Any, *, tensorboard: str | os.PathLike[str] | None = None
    ) -> None:
        if not isinstance(getattr(source, "updates", None), int):
            raise TypeError(
                "`source` must be a TrainStep, a BlockStep or a gradaccum.torch.optim.Optimizer. Received: "
                f"source of type {type(source).__name__}."
            )
        self.path = pathlib.Path(path)
        self.source = source
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut_off = self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")
        self._file: TextIO | None = self.path.open("a", encoding="utf-8")
        if cut_off:
            self._file.write("\n")
        self._board = _tensorboard(tensorboard)
        self._updates = source.updates
        self._noise: Any = None
        started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        versions = {"gradaccum": gradaccum.__version__, "torch": str(torch.__version__)}
        self._write({"start": {**versions, "source": type(source).__name__, "started": started}})
        self._since = time.perf_counter()

    def record(self, loss: float | Tensor | None = None, **more: float | Tensor) -> bool:
        """Write a line if an update was made since the last one; so it may be called after every micro-batch.

        Args:
            loss: The large batch's loss. Default: the optimizer's own `loss`, if it has one.
            more: Other numbers to record under their names.

        Returns:
            Whether a line was written.

        Raises:
            ValueError: The recorder is closed, or a value is no number.
        """
        if self._file is None:
            raise ValueError(f"The recorder of {str(self.path)!r} is closed.")
        source = self.source
        if source.updates == self._updates:
            return False
        self._updates = source.updates
        loss = getattr(source, "loss", None) if loss is None else loss
        values = {"loss": loss, "grad_norm": source.grad_norm, **more}
        line: dict[str, Any] = {"update": source.updates}
        line.update({name: _number(name, value) for name, value in values.items() if value is not None})
        sizes = {name: getattr(source, name, None) for name in ("micro_batch_size", "steps")}
        line.update({name: int(value) for name, value in sizes.items() if value})
        now = time.perf_counter()  # after the loss was read: the update is really done
        line["seconds"], self._since = now - self._since, now
        line["peak_memory"] = MemoryMeter(loss.device if isinstance(loss, Tensor) else torch.device("cpu")).mark()
        line.update(self._noise_scale())
        self._write(line)
        for name, value in line.items() if self._board is not None else ():
            if name != "update" and isinstance(value, (int, float)):
                self._board.add_scalar(name, value, source.updates)
        return True

    def _noise_scale(self) -> dict[str, Any]:
        """The noise scale, every now and then."""
        if self._noise is not None and self._updates - self._noise < _NOISE_EVERY:
            return {}
        try:
            scale = getattr(self.source, "noise_scale", None)
        except ValueError:  # it isn't measured
            self._noise = math.inf
            return {}
        if scale is None or math.isnan(scale.value):
            return {}
        self._noise = self._updates
        noise = {"value": scale.value, "low": scale.interval[0], "high": scale.interval[1]}
        noise |= {"batch_size": scale.batch_size, "updates": scale.updates, "unit": scale.unit}
        return {"noise_scale": scale.value, "noise": noise}

    def _write(self, record: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(encode(record) + "\n")
        self._file.flush()

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Run:
        """Read a recorder's file, even one that was cut off: `Recorder.read(path).report()`."""
        return read(path)

    def report(self) -> Report:
        """The run so far as a document that shows, and saves as `.html`, `.png` or `.txt`."""
        return read(self.path).report()

    def close(self) -> None:
        """Close the files. The report can still be made."""
        for writer in filter(None, (self._file, self._board)):
            writer.close()
        self._file = self._board = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"`{name}` must be a number. Received: {name}={value!r}.") from error


def _tensorboard(folder: str | os.PathLike[str] | None) -> Any:
    if folder is None:
        return None
    if importlib.util.find_spec("tensorboard") is None:
        logger.warning("TensorBoard is not installed, so nothing is written to %s: pip install tensorboard", folder)
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(os.fspath(folder))
