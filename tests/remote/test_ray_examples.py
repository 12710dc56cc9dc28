"""The examples on Ray run as they stand: a pipeline's program, and a deployment of Ray Serve's."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest

from support import ray_cluster
from support.checkpoint_files import checkpoint
from support.paths import EXAMPLES, PYTHON_PATH
from support.ray_cluster import ENVIRONMENT, RayCluster
from support.running_instances import free_port
from trinity.preprocess.loader import load_tokenizer_and_processor
from trinity.request import Request
from trinity.testing.oracle import Oracle

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(ray_cluster.missing()), reason=ray_cluster.missing()),
]
LIVENESS_S = 400.0
TOKENS = 12


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster.ray_cluster() as made:
        made.start_head(cpus=6)  # three instances, a replica, and what Ray Serve has beside it
        yield made


def environment(cluster: RayCluster) -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": PYTHON_PATH, "RAY_ADDRESS": cluster.address}


def test_the_pipelines_program_runs(cluster: RayCluster) -> None:
    command = [sys.executable, str(EXAMPLES / "ray_pipeline.py"), str(checkpoint("llava")), "1E1P1D"]
    run = subprocess.run(
        command, env=environment(cluster), capture_output=True, text=True, timeout=LIVENESS_S, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "E0 -> P0 -> D0: " in run.stdout
    assert "kv blocks P0 -> D0 by shm: " in run.stdout


@pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason="uvicorn is not installed")
@pytest.mark.skipif(importlib.util.find_spec("aiohttp") is None, reason="ray[serve] is not installed")
def test_the_deployment_of_ray_serve_answers_as_generate_does(cluster: RayCluster) -> None:
    model, port = checkpoint("llava"), free_port()
    text = load_tokenizer_and_processor(model).tokenizer
    wanted = text.decode(Oracle(model).generate(Request("Hello there", max_tokens=TOKENS)), skip_special_tokens=True)
    serving = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "ray_serve.py"), str(model), "1E1P1D", str(port)],
        env=environment(cluster),
        start_new_session=True,
    )
    try:
        assert ask(serving, port, {"prompt": "Hello there", "max_tokens": TOKENS}) == (200, wanted)
        for refused in ({"max_tokens": -7}, {"prompt": "far too long " * 5_000}):
            status, said = ask(serving, port, {"prompt": "Hello there", **refused})
            assert status == 400
            assert "-7" in said or "context" in said
    finally:
        serving.send_signal(signal.SIGINT)
        serving.wait(LIVENESS_S)


def ask(serving: subprocess.Popen[bytes], port: int, body: dict[str, object]) -> tuple[int, str]:
    """Ask until it answers; it does once its replica has a pipeline."""
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/", json.dumps(body).encode())
    until = time.monotonic() + LIVENESS_S
    while True:
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 400:
                    return error.code, error.read().decode()
        except OSError:
            pass
        assert serving.poll() is None
        assert time.monotonic() < until
        time.sleep(0.5)
