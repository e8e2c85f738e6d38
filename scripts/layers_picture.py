"""Draws docs/images/layers.svg: in which order passes run with accumulation, and layer by layer.

python -m scripts.layers_picture
"""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "images" / "layers.svg"
BLOCKS, MICRO_BATCHES = 4, 3
CELL, GAP, LEFT, TOP = 17, 46, 92, 58
COLOURS = ["#4c78a8", "#f58518", "#54a24b"]

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
    """Each micro-batch up and through the head; then each block over all of them, and its update."""
    passes, top = [], BLOCKS + 1
    for micro_batch in range(MICRO_BATCHES):
        passes += [(row, micro_batch, "forward") for row in range(top + 1)]
        passes.append((top, micro_batch, "backward"))
    for row in reversed(range(top)):
        for micro_batch in range(MICRO_BATCHES):
            passes += [(row, micro_batch, "again"), (row, micro_batch, "backward")]
        passes.append((row, -1, "update"))
    return [*passes, (top, -1, "update")]


def drawn(passes: list[Pass], left: int, title: str) -> str:
    """One of the two, as SVG."""
    names = ["embedding", *(f"block {place + 1}" for place in range(BLOCKS)), "head, loss"]
    parts = [f'<text x="{left}" y="{TOP - 18}" class="title">{title}</text>']
    for row, name in enumerate(names):
        y = TOP + (BLOCKS + 1 - row) * CELL
        parts.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{name}</text>')
        parts.append(f'<path d="M{left} {y + CELL - 1}h{len(passes) * 8}" stroke="#8884" />')
    for time, (row, micro_batch, kind) in enumerate(passes):
        x, y = left + time * 8, TOP + (BLOCKS + 1 - row) * CELL
        colour = COLOURS[micro_batch] if micro_batch >= 0 else "#777"
        fill = {"forward": "none", "again": "none"}.get(kind, colour)
        dash = ' stroke-dasharray="2 2"' if kind == "again" else ""
        parts.append(
            f'<rect x="{x + 1}" y="{y + 2}" width="6" height="{CELL - 5}" fill="{fill}" stroke="{colour}"{dash} />'
        )
    return "\n".join(parts)


def picture() -> str:
    """Both, one below the other as long as they are, with a legend."""
    first, second = accumulation(), layer_by_layer()
    width = LEFT * 2 + GAP + 8 * (len(first) + len(second))
    height = TOP + (BLOCKS + 2) * CELL + 44
    legend, x, y = [], LEFT, height - 18
    for kind, fill, dash, name in (
        ("", "none", "", "forward"),
        ("", "none", ' stroke-dasharray="2 2"', "forward again"),
        ("", COLOURS[0], "", "backward"),
        ("", "#777", "", "update, gradient freed"),
    ):
        colour = fill if fill == "#777" else COLOURS[0]
        legend.append(f'<rect x="{x}" y="{y}" width="6" height="12" fill="{fill}" stroke="{colour}"{dash}{kind} />')
        legend.append(f'<text x="{x + 12}" y="{y + 11}">{name}</text>')
        x += 34 + 7 * len(name)
    legend.append(f'<text x="{x + 20}" y="{y + 11}">one colour for each micro-batch; time runs to the right</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
            'font-size="12">',
            '<rect width="100%" height="100%" fill="#fff" />',
            "<style>.title { font-weight: bold; font-size: 14px }</style>",
            drawn(first, LEFT, "Accumulation: all gradients wait for the last micro-batch"),
            drawn(second, LEFT * 2 + GAP + 8 * len(first), "Layer by layer, updated in backward"),
            *legend,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(picture(), encoding="utf-8")
    print(f"{PAGE} written")
