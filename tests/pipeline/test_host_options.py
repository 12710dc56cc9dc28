"""A pipeline's keywords out of a file of hosts, as a command has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.certificates import Authority
from support.emulated_pipelines import MODEL
from support.running_instances import SECRET
from trinity.errors import ConfigError
from trinity.pipeline import Pipeline
from trinity.pipeline.deploy import read_hosted_options
from trinity.remote.hosts.hosts import plan_hosts, write_hosts


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_hosts(tmp_path / "hosts.toml", plan_hosts("1E1P1D", {"alpha": "10.0.0.1", "beta": "10.0.0.2"}))
    return tmp_path / "hosts.toml"


def test_a_trusted_network_is_that_of_channels_and_blocks(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_SECRET", SECRET)
    pipe = Pipeline(MODEL, **read_hosted_options(file, trusted_network=True))
    assert (str(pipe.placement), pipe.hosting) == ("1P1D1E", "process")
    assert {route.options["trusted_network"] for route in pipe.connector.routes.values()} == {True}


def test_certificates_are_for_the_channels_alone(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_SECRET", SECRET)
    files = Authority(tmp_path, "authority").issue("all").paths()
    pipe = Pipeline(MODEL, **read_hosted_options(file, files))
    assert not any(route.options for route in pipe.connector.routes.values())


@pytest.mark.parametrize(
    ("tls", "says"),
    [
        ((), r"reached over a network, at tcp:10.0.0.1:7000"),
        ((None, None, None), r"reached over a network"),
        (("a.pem", None, None), "TLS needs all of certificate, key and authority"),
        (("a.pem", "a.key", "b.pem"), "is no file"),
    ],
)
def test_what_is_missing_is_said(
    file: Path, tls: tuple[str | None, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_SECRET", SECRET)
    with pytest.raises(ConfigError, match=says):
        Pipeline(MODEL, **read_hosted_options(file, tls))
    with pytest.raises(ConfigError, match="cannot read"):
        read_hosted_options(file.parent / "none.toml")
