"""Cases of a benchmark that is run in several calls: what is measured is kept at once, and the next call goes on."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.setting import ROOT

Record = Any  # what JSON can hold


def digest_sources(root: Path = ROOT) -> str:
    """Digest the code that a figure on a GPU hangs on."""
    digest = hashlib.sha256()
    for folder in ("src/trinity", "benchmarks/gpu"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Cases:
    """Runs cases until ``until`` (s, monotonic clock), and keeps each in ``path``, a JSON object a line.

    Cases that other sources, sizes or devices (``key``) have left are not read. ``path`` None: kept nowhere. ``clean``
    is called after every case.
    """

    def __init__(self, path: Path | None, key: str, until: float, clean: Callable[[], object] = lambda: None) -> None:
        self.path, self.key, self.until, self._clean = path, key, until, clean
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        kept = [each for each in map(_parse, lines) if each is not None and each["key"] == key]
        self.records: dict[str, Record] = {each["case"]: each["record"] for each in kept}
        self.skipped: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def run(self, case: str, measure: Callable[[], Record], seconds: float) -> Record | None:
        """Return what is known of a case, or measure it; None where it fails or ``seconds`` are not left.

        What fails is told, tried again by the next call, and ends nothing else.
        """
        if case in self.records:
            return self.records[case]
        started = time.monotonic()
        if started + seconds > self.until:
            self.skipped[case] = "no time was left: run it again, it goes on from here"
            return None
        try:
            found = measure()
        except Exception as error:
            logging.getLogger("trinity").exception("case %s of the GPU benchmark failed", case)
            self.failed[case] = f"{type(error).__name__}: {error}"
            return None
        finally:
            self.seconds[case] = time.monotonic() - started
            gc.collect()
            self._clean()
        self._keep(case, found)
        return found

    def _keep(self, case: str, record: Record) -> None:
        self.records[case] = record
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": self.key, "case": case, "record": record}) + "\n")


def _parse(line: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(line)
    except ValueError:  # a call was ended while it wrote
        return None
    return found if isinstance(found, dict) and {"key", "case", "record"} <= set(found) else None
