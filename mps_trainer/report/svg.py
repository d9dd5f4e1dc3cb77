"""A matplotlib figure as SVG that stands inside a page and follows its colours, light or dark.

Each colour here is a stand-in of its own, replaced by a CSS variable of the page. Text stays text: it can be searched
and read aloud, and takes the page's font.
"""

from __future__ import annotations

import io
import re
from typing import Any

from mps_trainer.errors import ConfigError

#: Stand-in -> CSS variable. No other colour may be used in a figure for the page.
INK, SOFT, GRID, PAPER = "#010101", "#020202", "#030303", "#040404"
BLUE, ORANGE, GREEN, RED, PURPLE = "#010102", "#010103", "#010104", "#010105", "#010106"
_VARIABLES = {
    INK: "--ink", SOFT: "--soft", GRID: "--grid", PAPER: "--paper",
    BLUE: "--blue", ORANGE: "--orange", GREEN: "--green", RED: "--red", PURPLE: "--purple",
}  # fmt: skip

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.titlesize": 10,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": SOFT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.labelcolor": SOFT,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


class Drawing:
    """One figure with one pair of axes, drawn under the page's style: `with Drawing(name) as axis: ...`.

    Args:
        name: makes the ids unique in the page.
        size: inches, width and height.

    Attributes:
        svg: after the block, the `<svg>` element.
    """

    def __init__(self, name: str, size: tuple[float, float] = (5.4, 2.9)) -> None:
        self._name, self._size = name, size
        self._context: Any = None
        self.svg = ""

    def __enter__(self) -> Any:
        try:
            # Figure by itself brings its canvas: no display, no global state of pyplot.
            import matplotlib
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigError(
                f"drawing needs matplotlib, which does not import: {error}",
                "pip install -e '.[report]' in the clone of mps-trainer",
            ) from None
        self._context = matplotlib.rc_context({**_STYLE, "svg.hashsalt": self._name})
        self._context.__enter__()
        self._figure = Figure(figsize=self._size, layout="constrained")
        return self._figure.subplots()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if kind is None:
                self.svg = self._render()
        finally:
            self._context.__exit__(kind, error, trace)

    def _render(self) -> str:
        buffer = io.StringIO()
        self._figure.savefig(buffer, format="svg", metadata={"Date": None})
        text = buffer.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        for colour, variable in _VARIABLES.items():
            text = text.replace(colour, f"var({variable})")
        # Several figures in a page have the same ids otherwise, and a clip path is found by its id.
        text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{self._name}-", text)
        # The width is that of the page's column; the height follows from the viewBox.
        return re.sub(r'^<svg ([^>]*?)height="[^"]*"([^>]*?)width="[^"]*"', r"<svg \1\2", text, count=1)
