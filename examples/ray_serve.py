"""A pipeline behind Ray Serve: the replica holds the front end, a RaySupply has instances on the cluster's hosts.

python examples/ray_serve.py MODEL PLACEMENT [PORT]          serves on http://127.0.0.1:8000, until Ctrl-C

Needs ``pip install "ray[serve]"`` and a running cluster (``ray start --head``). A request is a JSON object {"prompt",
"max_tokens"}; the answer is its text, as it comes.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

import trinity


@serve.deployment(ray_actor_options={"num_cpus": 1}, max_ongoing_requests=256)
class Chat:
    """One replica, one pipeline. More load is more replicas, each with instances of its own."""

    async def __init__(self, model: str, placement: str) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        supply = trinity.RaySupply(placement, trusted_network=True)
        blocks = trinity.Connector("auto", options={"trusted_network": True})
        processes = trinity.ProcessConfig(supply=supply)
        self.pipe = trinity.Pipeline(model, placement, hosting="process", connector=blocks, processes=processes)
        await self.pipe.start()

    async def __call__(self, http: Request) -> Response:
        asked = await http.json()
        try:
            request = trinity.Request(asked["prompt"], max_tokens=asked.get("max_tokens", 64), untrusted=True)
            stream = self.pipe.stream(request)
            await stream.__aenter__()  # raises before the answer has begun
        except trinity.RequestError as error:
            return PlainTextResponse(str(error), status_code=400)
        return StreamingResponse(self.pass_on(stream), media_type="text/plain")

    async def pass_on(self, stream: trinity.Stream) -> AsyncIterator[str]:
        """Yield the text; a client that leaves ends its request."""
        try:
            async for token in stream:
                yield token.text
        finally:
            stream.cancel()

    def check_health(self) -> None:
        """Have Ray Serve replace the replica of a pipeline that has failed; lost instances come back by themselves."""
        if self.pipe.state != "running":
            raise RuntimeError(f"the pipeline is {self.pipe.state}")

    async def __del__(self) -> None:
        await self.pipe.aclose()


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        raise SystemExit("usage: python examples/ray_serve.py MODEL PLACEMENT [PORT]")
    model, placement, *port = sys.argv[1:]
    serve.start(http_options={"host": "127.0.0.1", "port": int(port[0]) if port else 8000})
    deployment: Any = Chat  # which a type checker takes for the class
    serve.run(deployment.bind(model, placement), blocking=True)
