"""State that passes move beside gradients: buffers of modules, and random number generators."""

from gradaccum.on_torch.state.snapshot import BufferSnapshot, Snapshot, as_found, evaluated, put, same
from gradaccum.on_torch.state.window_state import WindowState

__all__ = ["BufferSnapshot", "Snapshot", "WindowState", "as_found", "evaluated", "put", "same"]
