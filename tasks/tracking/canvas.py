"""What the plots share: figures, titles, and PNG bytes.

Invariants: no global matplotlib state (Figure objects on the Agg canvas), so a plot may be drawn in any thread;
matplotlib is imported only when something is drawn; a record without data gives a picture that says so.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GREY, GRID = "#1f2933", "#7b8794", "#e4e7eb"


def new_figure(
    panels: int, height: float, width: float | None = None, columns: int = 2
) -> tuple[Figure, list[Axes]]:
    """A figure of `panels` panels, each `height` inches high, in at most `columns` columns."""
    from matplotlib.figure import Figure

    columns = min(panels, columns)
    rows = math.ceil(panels / columns)
    figure = Figure(
        figsize=(width or (7.2 if columns == 1 else 11.5), 0.7 + height * rows), dpi=130, layout="constrained"
    )
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(panels)]
    for axis in axes:
        axis.set_axisbelow(True)
        axis.tick_params(colors=GREY, labelcolor=INK, labelsize=9)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axis.spines[side].set_color(GREY)
    return figure, axes


def write_title(figure: Figure, title: str, line: str) -> None:
    """A title, and below it one line in grey."""
    text = f"{title}\n" if line else title
    figure.suptitle(text, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK, linespacing=1.4)
    if line:
        inch = figure.get_size_inches()[1]
        figure.text(0.01, 1 - 0.41 / inch, line, ha="left", va="center", fontsize=10, color=GREY)


def say(axis: Axes, text: str) -> None:
    """A panel with nothing to draw says why."""
    axis.set_axis_off()
    axis.text(0.5, 0.5, text, ha="center", va="center", color=GREY, transform=axis.transAxes)


def to_png(figure: Figure) -> bytes:
    """The figure as PNG bytes."""
    sink = io.BytesIO()
    figure.savefig(sink, format="png", facecolor="white")
    return sink.getvalue()
