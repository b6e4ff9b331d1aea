"""Colours. On the page they are CSS variables, so one SVG is readable in a light and in a dark scheme."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Theme:
    """What the drawing functions ask for: text, faint lines, what a result is compared with, colours for lines."""

    ink: str
    muted: str
    grid: str
    before: str
    control: str
    lines: tuple[str, ...]


# In SVG these stand-ins are replaced by CSS variables after drawing; matplotlib accepts only real colours.
PAGE = Theme("#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05", tuple(f"#0a0b1{i}" for i in range(8)))
VARIABLES = {
    PAGE.ink: "var(--ink)",
    PAGE.muted: "var(--muted)",
    PAGE.grid: "var(--grid)",
    PAGE.before: "var(--before)",
    PAGE.control: "var(--control)",
    **{colour: f"var(--line{i})" for i, colour in enumerate(PAGE.lines)},
}

_LIGHT_LINES = ("#2f6fed", "#e4672b", "#0f9b77", "#8a4fd8", "#d6358a", "#5b6b8c", "#0aa2c0", "#7a5c48")
_DARK_LINES = ("#6ea3ff", "#ff9a63", "#3fd0a6", "#b98cff", "#ff77b8", "#9fb0d4", "#4fd2ec", "#c4a18b")

LIGHT = Theme("#17191f", "#686f7d", "#e3e6ec", "#a3aab8", "#c48a12", _LIGHT_LINES)
DARK = Theme("#eceef3", "#9aa1b0", "#2c313c", "#747c8c", "#e8b73c", _DARK_LINES)


def variables(theme: Theme) -> str:
    """The CSS declarations of a theme."""
    named = {
        "ink": theme.ink,
        "muted": theme.muted,
        "grid": theme.grid,
        "before": theme.before,
        "control": theme.control,
    }
    named |= {f"line{i}": colour for i, colour in enumerate(theme.lines)}
    return " ".join(f"--{name}: {colour};" for name, colour in named.items())
