"""The live page: one file of HTML that shows snapshots of a pipeline; it loads nothing from elsewhere.

``live.html`` beside this file is the page. Its script and style are the only ones that its policy lets run, by their
hashes. Served, it reads ``live/events`` beside its own address; with snapshots written into it, it shows those.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from functools import cache
from pathlib import Path

_PAGE = Path(__file__).with_name("live.html")
_DATA = '<script type="application/json" id="snapshot"></script>'


@cache
def read_live_page() -> str:
    """Read the page as it is shipped."""
    return _PAGE.read_text(encoding="utf-8")


@cache
def live_policy() -> str:
    """Content security policy of the page: its own script and style, and its own server; nothing else."""
    page = read_live_page()
    script, style = (_hash_of(tag, page) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def embed_snapshot(snapshot: bytes) -> str:
    """Return the page with a snapshot in it, as JSON, and its policy: it shows that one and asks no server."""
    safe = snapshot.decode().replace("<", "\\u003c")  # no end of a script's element
    head = f'<meta http-equiv="Content-Security-Policy" content="{live_policy()}">'
    page = read_live_page().replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{head}', 1)
    return page.replace(_DATA, _DATA.replace("></", f">{safe}</"), 1)


def _hash_of(tag: str, page: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    assert found is not None
    return f"'sha256-{b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"
