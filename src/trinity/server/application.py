"""The ASGI app: routes, keys, names of the model, readiness, and a drain that ends what runs."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from trinity.errors import ClosedError, RequestError
from trinity.pipeline import Pipeline
from trinity.pipeline.features import FeatureStream
from trinity.pipeline.frontend_host import PipelineState
from trinity.server.chat_reply import ChatReply
from trinity.server.client_names import ClientNames
from trinity.server.completion_reply import CompletionReply
from trinity.server.connection import ClientGone, Exchange, HeldBytes
from trinity.server.embeddings import check_pooling, make_embedding_request, read_embedding_body, write_embedding
from trinity.server.error_table import LOADING_RETRY_S, ApiError, describe_failure
from trinity.server.fields import ParsedCall, complete_request, read_chat_call, read_completion_call
from trinity.server.live_routes import list_live_routes
from trinity.server.loop_watch import LoopWatch
from trinity.server.prometheus import PipelineCollector, is_up
from trinity.server.protocol import ModelList, ServedModel, encode_json
from trinity.server.reply_loop import answer_call
from trinity.server.request_traces import RequestTracer
from trinity.server.responses_fields import read_response_call
from trinity.server.responses_reply import ResponsesReply
from trinity.server.resumed_streams import resume_stream
from trinity.server.settings import ServerConfig
from trinity.server.token_texts import TokenTexts
from trinity.server.tool_calls import choose_format, template_of

logger = logging.getLogger("trinity.server")
LEFT = 499  # what nginx logs for a client that has left

Handle = Callable[[Exchange], Awaitable[None]]


class ModelServer:
    """Serves one pipeline's model over HTTP.

    - ``pipe``: the pipeline; ``config``: names, keys and bounds.

    Attributes: ``draining``, True once no new request is taken; ``active``, the exchanges that are being served.
    """

    def __init__(self, pipe: Pipeline, config: ServerConfig) -> None:
        self.pipe, self.config = pipe, config
        self.models = config.models or (name_model(pipe),)
        self.draining = False
        self.watch: LoopWatch | None = None
        self.active: set[Exchange] = set()
        self._idle = asyncio.Event()
        self.held = HeldBytes(config.max_held_bytes)
        self._keys = [_digest(key.encode()) for key in config.api_keys]
        self._clients = ClientNames(config.trusted_proxies)
        self._created = int(time.time())
        self._counts: Counter[tuple[str, str]] = Counter()
        self._texts: TokenTexts | None = None
        self.tracer = RequestTracer(self.models[0], config.tracer_provider)
        self._registry = CollectorRegistry()
        self._registry.register(PipelineCollector(pipe, self.models[0]))
        self._registry.register(_ResponseCollector(self._counts))
        self._registry.register(_ProgressCollector(self))

    def make_app(self) -> Starlette:
        """Make the Starlette app; ``app.state.server`` is this object."""
        calls = {
            "/v1/chat/completions": self.serve_chat,
            "/v1/completions": self.serve_completion,
            "/v1/responses": self.serve_response,
            "/v1/embeddings": self.serve_embedding,
        }
        shown = {"/v1/models": self.show_models, "/metrics": self.show_metrics}
        open_to_all = {"/health": self.show_health, "/ready": self.show_ready}
        routes = [Route(path, Endpoint(self, path, handle), methods=["POST"]) for path, handle in calls.items()]
        routes += [Route(path, Endpoint(self, path, handle), methods=["GET"]) for path, handle in shown.items()]
        routes += [
            Route(path, Endpoint(self, path, handle, keyless=True), methods=["GET"])
            for path, handle in open_to_all.items()
        ]
        routes += [
            Route(f"{path}/{{name}}", Endpoint(self, f"{path}/", handle), methods=["GET"])
            for path, handle in (
                ("/v1/chat/completions", self.resume_chat),
                ("/v1/completions", self.resume_completion),
            )
        ]
        routes.append(Route("/v1/models/{name:path}", Endpoint(self, "/v1/models/", self.show_model), methods=["GET"]))
        live = list_live_routes(self.pipe, self._is_drained) if self.config.live else []
        routes += [
            Route(path, Endpoint(self, path, handle, keyless=keyless), methods=[method])
            for path, method, handle, keyless in live
        ]
        made = Starlette(routes=routes, exception_handlers={HTTPException: show_http_error})
        made.state.server = self
        return made

    # ------------------------------------------------------------ what every request passes

    def check_key(self, exchange: Exchange) -> None:
        """Raise ``ApiError`` 401 for a request without one of the keys. Takes as long for each wrong one."""
        if not self._keys:
            return
        scheme, given = _read_key(exchange)
        digest = _digest(given)
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        if scheme != b"bearer" or not any(matches):
            text = "send one of the server's keys as Authorization: Bearer KEY"
            raise ApiError(401, "invalid_api_key", text, headers={"www-authenticate": "Bearer"})

    def _is_drained(self) -> bool:
        return self.draining and not self.active

    def name_client(self, exchange: Exchange) -> str:
        """Name a client for the turns that requests have: by its key, or the address that it comes from."""
        key = _read_key(exchange)[1] if self._keys else b""  # as it was checked: its spelling makes no other client
        return self._clients.name(key, exchange.peer, exchange.raw_headers)

    def count_response(self, path: str, exchange: Exchange, left: bool) -> None:
        """Count a response by path and status; 499 for a client that has left."""
        self._counts[path, str(LEFT if left else exchange.status)] += 1

    def enter(self, exchange: Exchange) -> None:
        """Note that an exchange is served from now on. Raises ``ApiError`` 503 once the server drains."""
        if self.draining:
            text = "the server is shutting down; send the request to another one"
            raise ApiError(503, "draining", text, headers={"retry-after": "1", "connection": "close"})
        self.active.add(exchange)

    def leave(self, exchange: Exchange) -> None:
        """Note that an exchange is served no longer."""
        self.active.discard(exchange)
        if not self.active:
            self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Take no new requests, wait up to ``seconds`` for those that run, then end the rest with ``ClosedError``."""
        self.draining = True
        for patience, stop in ((seconds, False), (self.config.send_timeout_s, True)):
            for exchange in list(self.active) if stop else ():
                exchange.stop()
            self._idle.clear()
            if not self.active:
                return
            try:
                await asyncio.wait_for(self._idle.wait(), patience)
            except TimeoutError:
                logger.warning("%d requests still run after %g s of draining", len(self.active), patience)

    def check_model(self, name: str | None) -> str:
        """Return the name to report. Raises ``ApiError`` 404 for a model that is not served."""
        if name is not None and name not in self.models:
            known = ", ".join(self.models)
            raise ApiError(404, "model_not_found", f"there is no model {name[:100]!r} here; served: {known}", "model")
        return name or self.models[0]

    # ------------------------------------------------------------ endpoints

    async def serve_chat(self, exchange: Exchange) -> None:
        call, name = self._prepare(exchange, await exchange.read_json(read_chat_call))
        reply = ChatReply(call, name, self._token_texts(), self._tool_format(call))
        await answer_call(self.pipe, exchange, call, reply)

    async def serve_completion(self, exchange: Exchange) -> None:
        read = partial(read_completion_call, most_prompts=self.config.max_choices)
        call, name = self._prepare(exchange, await exchange.read_json(read))
        await answer_call(self.pipe, exchange, call, CompletionReply(call, name, self._token_texts()))

    async def resume_chat(self, exchange: Exchange) -> None:
        """Send the rest of a chat's stream whose server died."""
        self.enter(exchange)
        name = self._check_served(None)
        await resume_stream(self.pipe, exchange, lambda call: ChatReply(call, name, self._token_texts(), ""))

    async def resume_completion(self, exchange: Exchange) -> None:
        """Send the rest of a completion's stream whose server died."""
        self.enter(exchange)
        name = self._check_served(None)
        await resume_stream(self.pipe, exchange, lambda call: CompletionReply(call, name, self._token_texts()))

    async def serve_response(self, exchange: Exchange) -> None:
        read, asked = await exchange.read_json(read_response_call)
        call, name = self._prepare(exchange, read)
        reply = ResponsesReply(call, asked, name, self._token_texts(), self._tool_format(call))
        await answer_call(self.pipe, exchange, call, reply)

    async def serve_embedding(self, exchange: Exchange) -> None:
        asked = await exchange.read_json(read_embedding_body)
        name = self._check_served(asked.model)
        check_pooling(self.pipe, name)
        request = await asyncio.to_thread(make_embedding_request, asked)  # which looks at all parts of a chat
        request = complete_request(request, True, self.config.deadline_s, exchange.client)
        async with exchange.until_gone():
            async with FeatureStream.of(self.pipe.stream(request)) as stream:
                try:
                    found = await stream.collect_features()
                finally:
                    exchange.trace.add(stream)
            await exchange.reply(200, write_embedding(found, asked, name))

    def _check_served(self, model: str | None) -> str:
        """Return the name to report. Raises ``ApiError`` 404, ``ClosedError`` while the model is not there."""
        name = self.check_model(model)
        if self.pipe.state != "running":
            raise ClosedError("the model is not served")
        return name

    def _tool_format(self, call: ParsedCall) -> str:
        """Choose how the model writes calls. Raises ``ApiError`` where tools are given and nobody knows."""
        found = choose_format(self.config.tool_format, template_of(self.pipe.processor.tokenizer))
        if not found and call.tools.schemas and not call.tools.forced:
            text = "this model's chat template shows no way of calling tools that is known; start with --tool-parser"
            raise ApiError(400, "tools_unknown", text, "tools")
        return found

    def _prepare(self, exchange: Exchange, call: ParsedCall) -> tuple[ParsedCall, str]:
        """Check a call's model and size, and fill in what the server says. Returns the model's name as well."""
        name, count = self._check_served(call.model), call.choices * len(call.requests)
        if count > self.config.max_choices:
            raise ApiError(400, "too_many_choices", f"{count} answers asked for; {self.config.max_choices} are allowed")
        defaults = self.pipe.processor.defaults
        limited = defaults.max_new_tokens is not None or defaults.max_length is not None
        said = limited, self.config.deadline_s, exchange.client
        call.requests = tuple(complete_request(each, *said) for each in call.requests)
        return call, name

    def _token_texts(self) -> TokenTexts:
        if self._texts is None:
            self._texts = TokenTexts(self.pipe.processor.tokenizer)
        return self._texts

    async def show_models(self, exchange: Exchange) -> None:
        await exchange.reply(200, encode_json(ModelList(data=[self._describe(name) for name in self.models])))

    async def show_model(self, exchange: Exchange) -> None:
        name = self.check_model(exchange.path_parameters["name"])
        await exchange.reply(200, encode_json(self._describe(name)))

    def _describe(self, name: str) -> ServedModel:
        return ServedModel(id=name, created=self._created, max_model_len=self.pipe.processor.context_length)

    async def show_health(self, exchange: Exchange) -> None:
        """Answer 200 as long as the process can mend itself: 503 tells a supervisor to start it again."""
        alive = self.pipe.state in ("new", "starting", "running")
        await exchange.reply(200 if alive else 503, encode_json({"state": self.pipe.state}))

    async def show_ready(self, exchange: Exchange) -> None:
        """Answer 200 where a request would be served now; 503 names what is missing, and what makes no progress."""
        missing, stalled = missing_stages(self.pipe), self.pipe.find_stalled(self.config.stalled_after_s)
        ready = self.pipe.state == "running" and not self.draining and not missing and not stalled
        state = "draining" if self.draining else self.pipe.state
        shown = {each.part: round(each.seconds, 1) for each in stalled}
        said = {"state": state, "missing_stages": missing, "stalled": shown}
        await exchange.reply(200 if ready else 503, encode_json(said))

    async def show_metrics(self, exchange: Exchange) -> None:
        await exchange.reply(200, generate_latest(self._registry), kind=CONTENT_TYPE_PLAIN_0_0_4)


class Endpoint:
    """An ASGI app at one path. Errors of ``handle`` become responses by the table, or events where one has begun."""

    def __init__(self, server: ModelServer, path: str, handle: Handle, *, keyless: bool = False) -> None:
        self._server, self._path, self._handle, self._keyless = server, path, handle, keyless

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = self._server
        exchange = Exchange(scope, receive, send, server.config, server.held)
        left = False
        if exchange.method == "POST":
            exchange.trace = server.tracer.begin(self._path, exchange.headers)
        try:
            await self._serve(exchange)
        except ClientGone:
            left = True
        finally:
            exchange.close()
            exchange.trace.end(exchange.status, left)
            server.leave(exchange)
            server.count_response(self._path, exchange, left)

    async def _serve(self, exchange: Exchange) -> None:
        try:
            if not self._keyless:
                self._server.check_key(exchange)
            if exchange.method == "POST":
                exchange.client = self._server.name_client(exchange)
                self._server.enter(exchange)
            await self._handle(exchange)
        except ClientGone:
            raise
        except Exception as error:
            error = _explain(error, self._server.pipe.state)
            exchange.trace.fail(error, begun=bool(exchange.status))
            await exchange.fail(error)


def _read_key(exchange: Exchange) -> tuple[bytes, bytes]:
    """Read the scheme, in small letters, and the key that a request was sent with."""
    scheme, _, given = exchange.headers.get(b"authorization", b"").partition(b" ")
    return scheme.lower(), given.strip()


def _explain(error: Exception, state: PipelineState) -> Exception:
    """Return what a client is told in place of an error that comes of the pipeline's state."""
    if state in ("new", "starting") and isinstance(error, ClosedError):
        text = "the model is loading; /ready answers 200 once it is there"
        return ApiError(503, "loading", text, headers={"retry-after": str(LOADING_RETRY_S)})
    if state == "failed" and isinstance(error, RequestError):
        return ClosedError("the model has failed; send the request to another server")
    return error


class _ResponseCollector(Collector):
    """Counts of responses by path and status."""

    def __init__(self, counts: Counter[tuple[str, str]]) -> None:
        self._counts = counts

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> list[Metric]:
        family = CounterMetricFamily(
            "trinity_http_responses", "Responses; 499 where the client had left.", labels=("path", "status")
        )
        for labels, count in list(self._counts.items()):
            family.add_metric(labels, count)
        return [family]


class _ProgressCollector(Collector):
    """Collects all that makes no progress: parts of the pipeline, and the event loop in the past."""

    def __init__(self, server: ModelServer) -> None:
        self._server = server

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> list[Metric]:
        stalled = GaugeMetricFamily("trinity_part_stalled_seconds", "Time without progress.", labels=("part",))
        for part, seconds in self._server.pipe.find_stalled(self._server.config.stalled_after_s):
            stalled.add_metric((part,), seconds)
        watch = self._server.watch
        if watch is None:
            return [stalled]
        longest = GaugeMetricFamily("trinity_loop_held_seconds", "Longest time without a callback.", watch.longest_s)
        return [stalled, longest, CounterMetricFamily("trinity_loop_stalls", "Times it was stuck.", watch.stalls)]


async def show_http_error(request: HttpRequest, error: Exception) -> Response:
    """Answer a path or method that is not served, in OpenAI's form."""
    assert isinstance(error, HTTPException)
    code = {404: "unknown_path", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    failure = describe_failure(
        ApiError(error.status_code, code, f"{request.method} {request.url.path}: {error.detail}")
    )
    return Response(failure.body(), failure.status, dict(error.headers or {}), "application/json")


def missing_stages(pipe: Pipeline) -> list[str]:
    """List the letters of stages that no instance serves just now."""
    letters = {letter for each in pipe.instances for letter in each.roles}
    served = {letter for each in pipe.instances if is_up(pipe, each.name or "") for letter in each.roles}
    return sorted(letters - served)


def name_model(pipe: Pipeline) -> str:
    """Name a model by its folder."""
    return pipe.model.name if isinstance(pipe.model, Path) else "emulated"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def make_app(pipe: Pipeline, config: ServerConfig) -> Starlette:
    """Make the app of ``trinity.server.app``."""
    return ModelServer(pipe, config).make_app()
