"""The colours of a page by role, in light and in dark.

Text and what carries meaning has a contrast of 4.5 or more against the page and its cards, lines of
charts 3 or more (WCAG 2.1, AA).
"""

from __future__ import annotations

__all__ = ["COLOURS", "theme_css"]

COLOURS = {
    "page": ("#f6f6f3", "#14171a"),
    "card": ("#ffffff", "#1b1f24"),
    "ink": ("#1d2226", "#e6e8ea"),
    "muted": ("#59626b", "#a3adb7"),
    "line": ("#dcdeda", "#323840"),
    "grid": ("#ecedea", "#292f36"),
    "accent": ("#a13358", "#f29bb5"),
    "good": ("#1a6b42", "#74d3a0"),
    "good-wash": ("#e4f2ea", "#17301f"),
    "bad": ("#ab231c", "#ff938a"),
    "bad-wash": ("#fbe9e7", "#3a1d1b"),
    "warn": ("#7d5200", "#e8bb6b"),
    "warn-wash": ("#faf0dc", "#342914"),
    "plain-wash": ("#ecedea", "#282d33"),
    "step": ("#3a6bb0", "#86b2f0"),
    "wait": ("#c94f2a", "#ff9d73"),
    "host": ("#7b838c", "#8f99a4"),
    "pss": ("#237374", "#5cc8c2"),
    "anon": ("#7454ad", "#b79cf0"),
    "hwm": ("#93690d", "#d9b04f"),
    "limit": ("#ab231c", "#ff938a"),
    "calls": ("#7690b8", "#6d8aab"),
}
"""Role to its colour on a light and on a dark page."""


def theme_css() -> str:
    """The colours as custom properties: light, dark by the system's wish, and either by choice."""
    light = _properties(0)
    dark = _properties(1)
    return (
        f":root {{ color-scheme: light; {light} }}\n"
        "@media screen and (prefers-color-scheme: dark) {\n"
        f"  :root:not([data-theme=light]) {{ color-scheme: dark; {dark} }}\n"
        "}\n"
        f"@media screen {{ :root[data-theme=dark] {{ color-scheme: dark; {dark} }} }}\n"
    )


def _properties(place: int) -> str:
    return " ".join(f"--{name}: {colours[place]};" for name, colours in COLOURS.items())
