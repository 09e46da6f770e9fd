"""HTML page around an SVG picture, without external files."""

from __future__ import annotations

import html

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ margin: 0; background: white; overflow-x: auto; }}
svg {{ display: block; margin: 0 auto; min-width: 800px; width: 100%; max-width: 1800px; height: auto; }}
</style>
</head>
<body>
{svg}
</body>
</html>
"""


def page_around(svg: bytes, title: str) -> bytes:
    """Return an HTML page with an SVG picture that scales with the window."""
    text = svg.decode("utf-8")
    picture = text[text.index("<svg") :].strip()
    return PAGE.format(title=html.escape(title), svg=picture).encode("utf-8")
