"""Parts of the HTML page of a report: pictures and tables, without external files."""

from __future__ import annotations

import html
from collections.abc import Iterable

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1f2933; --quiet: #5f6b7a; --line: #e4e7eb; }}
body {{ margin: 0; background: white; color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }}
svg {{ display: block; margin: 0 auto; min-width: 800px; width: 100%; max-width: 1800px; height: auto; }}
section {{ max-width: 1200px; margin: 0 auto; padding: 8px clamp(12px, 3vw, 24px); overflow-x: auto; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: 2px 16px 2px 0; text-align: left; font-weight: normal; border-bottom: 1px solid var(--line); }}
th {{ color: var(--quiet); }}
pre {{ white-space: pre-wrap; }}
iframe {{ width: 100%; height: 720px; border: 1px solid var(--line); }}
@media (prefers-color-scheme: dark) {{
 :root {{ --ink: #e8edf3; --quiet: #97a3b2; --line: #2b3440; }}
 body {{ background: #12161c; }}
 svg {{ border-radius: 8px; }}
}}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def page_of_parts(title: str, parts: Iterable[str]) -> bytes:
    """Return an HTML page of these parts."""
    return PAGE.format(title=html.escape(title), body="\n".join(parts)).encode("utf-8")


def section(heading: str, *parts: str) -> str:
    """Return a part of a page, below a heading."""
    return f"<section><h2>{html.escape(heading)}</h2>{''.join(parts)}</section>"


def page_within(page: bytes, title: str) -> str:
    """Return a page, whole, as a part of another one."""
    return f'<iframe title="{html.escape(title)}" srcdoc="{html.escape(page.decode("utf-8"))}"></iframe>'
