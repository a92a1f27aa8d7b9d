"""The colour maps of the page, for pictures that are drawn without it.

Made in OKLCH: lightness rises evenly from one end to the other, so that the order of values survives every
kind of colour blindness and a black-and-white print. Hues only help.
"""

from __future__ import annotations

import math
from functools import cache

__all__ = ["NOT_FINITE", "css", "sequential"]

NOT_FINITE = "#e51452"
_SIZE = 256


def _srgb(lightness: float, chroma: float, hue: float) -> tuple[int, int, int] | None:
    """A colour of OKLCH as a screen shows it; None if no screen can."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * middle + 1.707614701 * short,
    )
    if any(c < -1e-4 or c > 1.0001 for c in linear):
        return None
    shown = [
        12.92 * c if c <= 0.0031308 else 1.055 * c ** (1 / 2.4) - 0.055 for c in (max(0.0, x) for x in linear)
    ]
    red, green, blue = (round(255 * min(1.0, c)) for c in shown)
    return red, green, blue


@cache
def sequential() -> tuple[tuple[int, int, int], ...]:
    """From deep blue over green to pale yellow, in 256 steps."""
    table = []
    for number in range(_SIZE):
        t = number / (_SIZE - 1)
        chroma, colour = 0.13, None
        while colour is None and chroma > 0:
            colour = _srgb(0.24 + 0.7 * t, chroma, 285 - 185 * t**0.9)
            chroma -= 0.004
        table.append(colour or (0, 0, 0))
    return tuple(table)


def css(t: float) -> str:
    """The colour at ``t``, from 0 to 1, as CSS says it."""
    red, green, blue = sequential()[round(min(1.0, max(0.0, t)) * (_SIZE - 1))]
    return f"#{red:02x}{green:02x}{blue:02x}"
