"""Draws docs/images/layers.svg: in which order passes run with accumulation, and layer by layer.

python -m scripts.layers_picture
"""

from __future__ import annotations

from pathlib import Path

from scripts.pictures import svg, text

PAGE = Path(__file__).parent.parent / "docs" / "images" / "layers.svg"
BLOCKS, MICRO_BATCHES = 4, 3
CELL, GAP, LEFT, TOP = 17, 46, 92, 58
COLOURS = ["a", "b", "c"]

Pass = tuple[int, int, str]
"""Which row of the picture, which micro-batch, and what it is: forward, backward or update."""


def accumulation() -> list[Pass]:
    """Each micro-batch up and down, then all updates."""
    rows = range(BLOCKS + 2)
    passes = []
    for micro_batch in range(MICRO_BATCHES):
        passes += [(row, micro_batch, "forward") for row in rows]
        passes += [(row, micro_batch, "backward") for row in reversed(rows)]
    return passes + [(row, -1, "update") for row in rows]


def layer_by_layer() -> list[Pass]:
    """Each micro-batch up, and back through the last block; then each other one over all of them, and its update."""
    passes, top = [], BLOCKS + 1
    for micro_batch in range(MICRO_BATCHES):
        passes += [(row, micro_batch, "forward") for row in range(top + 1)]
        passes += [(top, micro_batch, "backward"), (top - 1, micro_batch, "backward")]
    passes.append((top - 1, -1, "update"))
    for row in reversed(range(top - 1)):
        for micro_batch in range(MICRO_BATCHES):
            passes += [(row, micro_batch, "again"), (row, micro_batch, "backward")]
        passes.append((row, -1, "update"))
    return [*passes, (top, -1, "update")]


def mark(x: float, y: float, kind: str, colour: str) -> str:
    """A pass: forward ones are outlines, dashed where they run again."""
    fill = "none" if kind in ("forward", "again") else f"var(--{colour})"
    dash = ";stroke-dasharray:2 2" if kind == "again" else ""
    return f'<rect x="{x:g}" y="{y:g}" width="6" height="{CELL - 5}" style="fill:{fill};stroke:var(--{colour}){dash}"/>'


def drawn(passes: list[Pass], left: int, title: str) -> list[str]:
    """One of the two, as shapes."""
    names = ["embedding", *(f"block {place + 1}" for place in range(BLOCKS)), "head, loss"]
    parts = [text(left, TOP - 18, title, "title")]
    for row, name in enumerate(names):
        y = TOP + (BLOCKS + 1 - row) * CELL
        parts.append(text(left - 8, y + 12, name, "small end"))
        parts.append(f'<path d="M{left} {y + CELL - 1}h{len(passes) * 8}" style="stroke:var(--rule)"/>')
    for time, (row, micro_batch, kind) in enumerate(passes):
        colour = COLOURS[micro_batch] if micro_batch >= 0 else "quiet"
        parts.append(mark(left + time * 8 + 1, TOP + (BLOCKS + 1 - row) * CELL + 2, kind, colour))
    return parts


def picture() -> str:
    """Both beside each other as long as they are, with a legend."""
    first, second = accumulation(), layer_by_layer()
    width = LEFT * 2 + GAP + 8 * (len(first) + len(second)) + 20
    height = TOP + (BLOCKS + 2) * CELL + 44
    legend, x, y = [], LEFT, height - 20
    kinds = {"forward": "forward", "again": "forward again", "backward": "backward", "update": "update, gradient freed"}
    for kind, name in kinds.items():
        legend += [mark(x, y, kind, "quiet" if kind == "update" else "a"), text(x + 12, y + 10, name, "small")]
        x += 34 + 7 * len(name)
    legend.append(text(x + 20, y + 10, "one colour for each micro-batch; time runs to the right", "small"))
    words = (
        "Accumulation: each micro-batch goes forward and backward through all blocks, and the updates come last. "
        "Layer by layer: each block's backward pass runs over all micro-batches, then its update is made."
    )
    both = [
        *drawn(first, LEFT, "Accumulation: gradients wait for the last micro-batch"),
        *drawn(second, LEFT * 2 + GAP + 8 * len(first), "Layer by layer, updated in backward"),
    ]
    return svg(width, height, words, [*both, *legend])


if __name__ == "__main__":
    PAGE.write_text(picture(), encoding="utf-8")
    print(f"{PAGE} written")
