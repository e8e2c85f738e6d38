"""The pictures in docs/images, from measurements: `python -m scripts.pictures [NAME ...]`.

Each is one small SVG with a ground of its own, for light and dark screens. The heat map is drawn from the table in
docs/peers.md, scaling from the model of docs/scaling.md; loss is measured on the demo's attention network, memory on a
transformer of eight blocks, which takes a minute.
"""

from __future__ import annotations

import html
import pathlib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"

_STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: var(--ink) }
.small { font-size: 11px; fill: var(--quiet) } .mid { text-anchor: middle } .end { text-anchor: end }
.on { fill: var(--ground) }
.title { font-weight: 600; font-size: 14px }
svg { --ground: #ffffff; --ink: #24292f; --quiet: #57606a; --rule: #d8dee4; --a: #0072b2; --b: #d55e00; --c: #009e73;
  --good: #a6dfb5; --bad: #ffb3a7; --none: #e6e9ed }
@media (prefers-color-scheme: dark) { svg { --ground: #161b22; --ink: #e6edf3; --quiet: #9aa4ae; --rule: #30363d;
  --a: #4aa8e0; --b: #ff8c42; --c: #2fd0a3; --good: #1c5b34; --bad: #8a2f26; --none: #30363d } }
"""


def svg(width: int, height: int, words: str, shapes: Iterable[str]) -> str:
    """The file: `words` say what it shows, for those who don't see it."""
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img"><title>{html.escape(words)}</title><style>{_STYLE}</style>\n'
        f'<rect width="{width}" height="{height}" rx="8" style="fill:var(--ground)"/>\n{body}\n</svg>\n'
    )


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """A line of text that starts at a point; `kind` is its class."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{html.escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    """A rectangle, in one of the style's colours."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" style="fill:var(--{fill})"/>'


def line(
    points: Sequence[tuple[float, float]], colour: str, width: float = 2, dash: str = "", opacity: float = 1
) -> str:
    """A line through these points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = f";stroke-dasharray:{dash}" if dash else ""
    return (
        f'<polyline points="{path}" style="fill:none;stroke:var(--{colour});stroke-width:{width:g};'
        f'stroke-linejoin:round;opacity:{opacity:g}{dashes}"/>'
    )


def window() -> str:
    """A window of four micro-batches of 16 rows, and the shorter one at an epoch's end."""
    shapes = [text(20, 28, "Windows: micro-batches of 16 rows, 4 to an update", "title")]
    x = 20.0
    for rows, total in (([16, 16, 16, 16], 64), ([16, 16, 8], 40)):
        start = x
        for number in rows:
            width = number * 4
            shapes += [box(x, 66, width - 4, 44, "a"), text(x + width / 2 - 2, 58, f"{number}", "small mid")]
            x += width
        middle = (start + x - 4) / 2
        shapes += [
            line([(start, 120), (start, 128), (x - 4, 128), (x - 4, 120)], "quiet", 1.5),
            text(middle, 148, "sum of weights times gradients", "mid"),
            text(middle, 166, f"divided by {total}, the rows it holds", "mid"),
            box(middle - 60, 178, 120, 30, "b"),
            text(middle, 198, "one update", "mid on"),
        ]
        x += 20
    shapes.append(
        text(20, 232, "An epoch ends with its last, shorter window. Memory is that of one micro-batch.", "small")
    )
    return svg(500, 250, "Two windows: 4 x 16 rows and, at the epoch's end, 16 + 16 + 8; an update each.", shapes)


def exactness() -> str:
    """The table of docs/peers.md in colours."""
    page = (ROOT / "docs/peers.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in row.strip("|\n").split("|")] for row in re.findall(r"^\|.*\|$", page, re.MULTILINE)
    ]
    names, cells = rows[0][1:], rows[2:]
    left, wide, high = 140, 92, 28
    shapes = [text(20, 28, "Is the update the large batch's?", "title")]
    shapes += [text(left + wide * (i + 0.5), 56, name, "mid") for i, name in enumerate(names)]
    for j, (situation, *found) in enumerate(cells):
        y = 66 + j * high
        (name,) = re.findall(r"\*\*(.+?)\*\*", situation)
        shapes.append(text(left - 10, y + 18, name, "end"))
        for i, cell in enumerate(found):
            short = re.sub(r"[:(].*", "", cell).strip()
            short = {"not possible": "none"}.get(short, short)
            fill = "good" if short == "exact" else "bad" if short.startswith(("off", "NaN")) else "none"
            shapes += [
                box(left + i * wide, y, wide - 3, high - 3, fill),
                text(left + (i + 0.5) * wide - 2, y + 17, short, "mid"),
            ]
    words = "Exact, off by how much, or refused, for each library: " + "; ".join(" ".join(row) for row in cells)
    return svg(left + wide * len(names) + 20, 66 + high * len(cells) + 18, re.sub(r"[*|]", "", words), shapes)


def chart(
    title: str, x_label: str, curves: Sequence[tuple[str, Sequence[float], Sequence[float]]], y_label: str
) -> str:
    """Curves over one axis; the first is broad and pale, the second dashed: where they coincide, both are seen."""
    width, height, left, top, bottom = 640, 320, 60, 60, 72
    most_x = max(max(x) for _, x, _ in curves)
    least, most = min(0.0, *(min(y) for *_, y in curves)), max(max(y) for *_, y in curves)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (width - left - 30) * x / most_x
        return left + across, height - bottom - (height - top - bottom) * (y - least) / (most - least)

    shapes = [
        text(20, 28, title, "title"),
        text(20, 48, y_label, "small"),
        text(width - 30, height - 38, x_label, "small end"),
    ]
    for i in range(5):
        at = most_x * i / 4
        shapes.append(text(place(at, least)[0], height - 54, f"{at:.3g}", "small end" if i == 4 else "small mid"))
    step = next(s for s in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if (most - least) / s <= 6)
    for i in range(int(least // step), int(most // step) + 1):
        if least <= i * step <= most:
            at = place(0, i * step)[1]
            shapes += [
                line([(left, at), (width - 30, at)], "rule", 1),
                text(left - 8, at + 4, f"{i * step:g}", "small end"),
            ]
    looks = ({"width": 7, "opacity": 0.4}, {"width": 2, "dash": "6 3"}, {"width": 2}, {"width": 2})
    colours = ("a", "b", "c", "ink")
    for i, ((name, x, y), colour, look) in enumerate(zip(curves, colours, looks, strict=False)):
        shapes.append(line([place(*point) for point in zip(x, y, strict=True)], colour, **look))  # type: ignore[arg-type]
        at = left + (190 if len(curves) < 4 else 145) * i
        shapes += [
            line([(at, height - 18), (at + 24, height - 18)], colour, **look),
            text(at + 30, height - 14, name, "small"),
        ]  # type: ignore[arg-type]
    ends = "; ".join(f"{name} ends at {y[-1]:.3g}" for name, _, y in curves)
    return svg(width, height, f"{title}. {y_label}: {ends}.", shapes)


def scaling() -> str:
    """The model of docs/scaling.md: how much of an update's time is passes, by ranks, window and link."""
    from benchmarks.scaling_model import Link, Scaling

    ranks = [2**i for i in range(13)]
    windows = ((1, "b"), (4, "c"), (16, "a"), (64, "ink"))
    wide, high, top, shapes, told = 280, 190, 92, [], []
    for place, name in enumerate(("10Gbit/s", "25Gbit/s", "100Gbit/s")):
        left = 56 + place * (wide + 34)
        job = Scaling(0.5, 2e9, Link.parse(name), update_seconds=0.05, spread=0.05)

        def at(count: int, part: float, left: int = left) -> tuple[float, float]:
            return left + wide * (count.bit_length() - 1) / 12, top + high * (1 - part)

        shapes.append(text(left, top - 14, name))
        for part in (0, 0.25, 0.5, 0.75, 1):
            shapes.append(line([at(1, part), at(4096, part)], "rule", 1))
            if not place:
                shapes.append(text(left - 8, at(1, part)[1] + 4, f"{part:.0%}", "small end"))
        shapes += [text(at(count, 0)[0], top + high + 18, f"{count:,}", "small mid") for count in (1, 8, 64, 512, 4096)]
        for steps, colour in windows:
            shapes.append(line([at(count, job.efficiency(count, steps)) for count in ranks], colour, 2))
            each = [at(count, job.efficiency(count, steps, every_micro_batch=True)) for count in ranks]
            shapes += [line(each, colour, 1.5, "2 4")] if steps == 16 else []
            told.append(f"{name}, {steps} steps, 4096 ranks: {job.efficiency(4096, steps):.0%}")
    foot = top + high + 48
    for i, (steps, colour) in enumerate(windows):
        shapes += [
            line([(56 + 130 * i, foot - 4), (80 + 130 * i, foot - 4)], colour, 2),
            text(86 + 130 * i, foot, f"{steps} step{'s' if steps > 1 else ''}", "small"),
        ]
    shapes += [
        line([(576, foot - 4), (600, foot - 4)], "a", 1.5, "2 4"),
        text(606, foot, "16 steps, reduced after each micro-batch", "small"),
        text(20, 28, "Part of an update's time in passes, by ranks", "title"),
        text(20, 48, "A billion parameters in bfloat16, 0.5 s a micro-batch, 5 % spread between ranks", "small"),
    ]
    return svg(56 + 3 * (wide + 34), foot + 16, "Part of the time in passes. " + "; ".join(told), shapes)


def loss() -> str:
    """How the three loops of the demo's attention network part, or don't."""
    from examples.demo.text import TextSetup, python_text
    from examples.demo.text_torch import train

    setup = TextSetup()
    rows = python_text(setup.length)
    large, *others = train(setup, rows[: setup.rows], rows[setup.rows :][:32], lambda name: None)
    updates = range(1, len(large.losses) + 1)
    curves = [(loop.name, updates, [100 * value for value in loop.distances]) for loop in (large, *others)]
    return chart("Distance from the whole batch's parameters", "update", curves, "% of how far those have moved")


def memory() -> str:
    """Bytes of tensors alive over one window of a transformer: whole, accumulated, chunked, layer by layer."""
    import torch
    from examples.demo.guide_torch import CountBytes
    from torch import nn

    import gradaccum.torch

    class Trace(CountBytes):
        """Keeps what is alive after each operation."""

        def __torch_dispatch__(self, *arguments: object, **more: object) -> object:
            result = super().__torch_dispatch__(*arguments, **more)  # type: ignore[arg-type]
            self.seen.append(self.alive / 2**20)
            return result

        def __init__(self, tensors: object) -> None:
            self.seen: list[float] = []
            super().__init__(tensors)

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.head = nn.Embedding(128, 128), nn.Linear(128, 128)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(8)
            )

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def compute_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    ways: dict[str, dict[str, object]] = {
        "whole batch": {"micro_batch_size": 64},
        "16 micro-batches": {"micro_batch_size": 4},
        "chunked": {"micro_batch_size": 64},
        "layer by layer": {"micro_batch_size": 4, "blocks": "blocks", "update": "in_backward"},
    }
    ids = torch.randint(128, (64, 16), generator=torch.Generator().manual_seed(0))
    curves = []
    for name, how in ways.items():
        model = Transformer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        called = gradaccum.torch.chunked(model, 4) if name == "chunked" else model
        kind: Any = gradaccum.torch.BlockStep if "blocks" in how else gradaccum.torch.TrainStep
        step = kind(called, optimizer, compute_loss=compute_loss, verify=False, **how)
        step(ids)  # `chunked` tries itself out once
        optimizer.zero_grad()
        with Trace(model.parameters()) as trace:
            step(ids)
        count = len(trace.seen)
        every = max(1, count // 300)
        kept = [max(trace.seen[i : i + every]) for i in range(0, count, every)]
        curves.append((name, [100 * (i + 1) / len(kept) for i in range(len(kept))], kept))
    return chart("Memory over a window of 64 rows", "% of the window's operations", curves, "MiB of tensors alive")


def ways() -> str:
    """The three ways in: what the user's loop brings, and what becomes of it."""
    shapes = [text(20, 28, "Three ways in, one update", "title")]
    panels = (
        ("Wrap the optimizer", "the loop brings small batches", "Optimizer(optimizer, steps=4)"),
        ("Split the batch", "the loop brings the large batch", "TrainStep(model, optimizer, ...)"),
        ("Chunk the model", "the loss looks at all rows", "chunked(encoder, 16)"),
    )
    for place, (title, brings, code) in enumerate(panels):
        x = 20.0 + place * 250
        shapes += [text(x, 62, title), text(x, 80, brings, "small")]
        if place == 1:
            shapes += [box(x, 92, 220, 34, "a"), text(x + 110, 114, "64 rows", "mid on")]
            shapes += [line([(x + 110, 130), (x + 110, 146)], "quiet", 1.5)]
        top = 150 if place == 1 else 92
        for i in range(4):
            shapes += [box(x + 56 * i, top, 52, 34, "a"), text(x + 56 * i + 26, top + 22, "16", "mid on")]
        if place == 2:
            shapes += [
                line([(x + 110, 130), (x + 110, 146)], "quiet", 1.5),
                box(x, 150, 220, 34, "c"),
                text(x + 110, 172, "one loss over 64 outputs", "mid on"),
            ]
        if not place:
            shapes += [
                line([(x, 132), (x, 140), (x + 220, 140), (x + 220, 132)], "quiet", 1.5),
                text(x + 110, 172, "added up, divided by 64", "mid"),
            ]
        shapes += [
            line([(x + 110, 188), (x + 110, 204)], "quiet", 1.5),
            box(x + 50, 208, 120, 30, "b"),
            text(x + 110, 228, "one update", "mid on"),
            text(x, 262, code, "small"),
        ]
    return svg(
        760,
        282,
        "Wrap the optimizer: small batches are added up. Split the batch: the large batch is cut. Chunk the model: one "
        "loss over the outputs of all chunks. Each makes the large batch's update.",
        shapes,
    )


def main() -> None:
    """Draw those that are named, or all."""
    for name in sys.argv[1:] or ["window", "ways", "exactness", "scaling", "loss", "memory"]:
        (IMAGES / f"{name}.svg").write_text(globals()[name](), encoding="utf-8")


if __name__ == "__main__":
    main()
