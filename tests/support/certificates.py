"""Certificates that tests make anew with the ``openssl`` program, of authorities of their own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from trinity.remote.channel.tls import TLSConfig

OPENSSL = shutil.which("openssl")
NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


def run(*arguments: str) -> None:
    if OPENSSL is None:
        pytest.skip("needs the openssl program, to make certificates")
    subprocess.run([OPENSSL, *arguments], check=True, capture_output=True)


class Authority:
    """A private authority in a folder; ``issue`` makes a certificate of it and its key."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.certificate, self.key = folder / f"{name}.pem", folder / f"{name}.key"
        out = ["-keyout", str(self.key), "-out", str(self.certificate)]
        run("req", "-x509", *NEW_KEY, "-subj", f"/CN={name}", "-days", "2", *out)

    def issue(self, name: str, days: int = 2) -> TLSConfig:
        """``days`` of -1: it ended yesterday."""
        certificate, key, asked = (self.folder / f"{self.name}-{name}.{kind}" for kind in ("pem", "key", "csr"))
        run("req", *NEW_KEY, "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(asked))
        signer = ["-CA", str(self.certificate), "-CAkey", str(self.key), "-CAcreateserial", "-days", str(days)]
        run("x509", "-req", "-in", str(asked), *signer, "-out", str(certificate))
        return TLSConfig(certificate, key, self.certificate)


def make_certificates(folder: Path) -> list[str]:
    """Files of one certificate that all sides show."""
    return [str(each) for each in Authority(folder, "authority").issue("all").paths()]
