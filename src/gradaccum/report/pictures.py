"""The pictures of a report, drawn with matplotlib and without pyplot's global state. Imported only to draw."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from gradaccum.report.blocks import Bars, Curves, format_value

_WIDTH, _HEIGHT = 6.0, 4.0
"""Inches of one figure."""

# Okabe and Ito's colours, which colour-blind readers can tell apart, brightened for the dark ground.
_THEMES = {
    "light": {
        "ground": "#ffffff",
        "ink": "#24292f",
        "grid": "#d8dee4",
        "colours": ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a6a00", "#56b4e9"],
    },
    "dark": {
        "ground": "#161b22",
        "ink": "#d7dde3",
        "grid": "#30363d",
        "colours": ["#4aa8e0", "#ff8c42", "#2fd0a3", "#e59ac5", "#e0cc4a", "#9bd3f5"],
    },
}


def picture(figures: Sequence[Curves | Bars], *, title: str = "", theme: str = "light", format: str = "png") -> bytes:
    """The figures side by side, at most three in a row, as PNG or SVG."""
    columns = 2 if len(figures) == 4 else min(len(figures), 3)
    rows = -(-len(figures) // columns)
    colours = _THEMES[theme]
    settings: dict[str, Any] = {
        "font.size": 10.5,
        "axes.titlesize": 12,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.edgecolor": colours["grid"],
        "axes.facecolor": colours["ground"],
        "axes.labelcolor": colours["ink"],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.facecolor": colours["ground"],
        "grid.color": colours["grid"],
        "legend.edgecolor": "none",
        "legend.facecolor": colours["ground"],
        "legend.framealpha": 0.8,
        "text.color": colours["ink"],
        "xtick.color": colours["ink"],
        "ytick.color": colours["ink"],
        "svg.hashsalt": "gradaccum",  # the same report gives the same bytes
    }
    with matplotlib.rc_context(settings):
        bars = [len(figure.values) for figure in figures if isinstance(figure, Bars)]
        height = max(_HEIGHT, 1.0 + 0.42 * max(bars, default=0)) * rows + (0.4 if title else 0)  # many take more
        layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12)
        figure = Figure(figsize=(_WIDTH * columns, height), layout=layout)
        canvas = FigureCanvasAgg(figure) if format == "png" else FigureCanvasSVG(figure)
        if title:
            figure.suptitle(title, fontsize=14, fontweight="bold", x=0.01, ha="left")
        for index, content in enumerate(figures):
            axes = figure.add_subplot(rows, columns, index + 1)
            axes.set_axisbelow(True)
            axes.set_title(content.title)
            draw: Any = _draw_curves if isinstance(content, Curves) else _draw_bars
            draw(axes, content, colours)
        out = io.BytesIO()
        canvas.print_figure(out, format=format, **({"dpi": 150} if format == "png" else {"metadata": {"Date": None}}))
    return out.getvalue()


def data_uri(figure: Curves | Bars, theme: str) -> str:
    """One figure as an address that carries the picture itself."""
    svg = picture([figure], theme=theme, format="svg")
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")


def _draw_curves(axes: Any, content: Curves, colours: dict[str, Any]) -> None:
    palette = colours["colours"]
    for index, curve in enumerate(content.curves):
        colour = palette[index % len(palette)]
        if curve.points or len(curve.x) == 1:
            axes.plot(curve.x, curve.y, "o", color=colour, label=curve.name, markersize=6)
            continue
        # The first is broad and pale, the second dashed: where they coincide, both are seen.
        style: dict[str, Any] = {"linewidth": 2}
        if len(content.curves) > 1 and index == 0:
            style = {"linewidth": 6, "alpha": 0.45, "solid_capstyle": "round"}
        elif index % 2:
            style = {"linewidth": 2, "linestyle": (0, (4, 2))}
        axes.plot(curve.x, curve.y, color=colour, label=curve.name, **style)
    for name, value in content.limits.items():
        axes.axhline(value, color=colours["ink"], linewidth=1.2, linestyle=":", label=name)
    axes.set_xlabel(content.x_label)
    axes.set_ylabel(content.y_label)
    axes.grid(True, linewidth=0.8)
    if content.log:
        axes.set_yscale("log")
    if content.log_x:
        axes.set_xscale("log")
    elif content.curves and all(float(x).is_integer() for curve in content.curves for x in curve.x):
        axes.xaxis.get_major_locator().set_params(integer=True)
    if len(content.curves) + len(content.limits) > 1:
        axes.legend()


def _draw_bars(axes: Any, content: Bars, colours: dict[str, Any]) -> None:
    names, values = list(content.values), [float(value) for value in content.values.values()]
    palette = colours["colours"]
    # A handful of bars have the colours of the curves of the same order; many have one.
    fill = palette[: len(values)] if len(values) <= len(palette) else palette[0]
    positions = range(len(values))
    bars = axes.barh(positions, values, height=0.45, color=fill, log=content.log)
    axes.bar_label(bars, [f" {format_value(value)} {content.unit}".rstrip() for value in values], padding=3)
    # A name stands above its bar, where long ones (a parameter's path) have room.
    for position, name in zip(positions, names, strict=True):
        axes.annotate(name, (0, position - 0.27), xycoords=("axes fraction", "data"), va="bottom", fontsize=10)
    axes.set_yticks([])
    axes.set_ylim(len(values) - 0.5, -0.75)
    axes.margins(x=0.22)
    axes.set_xlabel(content.unit)
    axes.grid(True, axis="x", linewidth=0.8)
    for name, value in content.limits.items():
        axes.axvline(value, color=colours["ink"], linewidth=1.2, linestyle=":", label=name)
    if content.limits:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderpad=0.0)  # above: bars may be anywhere below
