"""Settings of a server: names, keys and bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from trinity.errors import ConfigError
from trinity.errors.arguments import Positive, Whole, check_arguments
from trinity.server.client_names import read_networks

HELD_BYTES = 192 << 20  # bytes: the least default of max_held_bytes
SHORT_BODY = 1 << 20  # bytes: a long chat, or a small picture
ToolFormat = Literal["auto", "none", "hermes", "llama3_json", "qwen3_coder"]


@check_arguments
class ServerConfig:
    """Names, keys and bounds of a server.

    - ``models`` (the pipeline's own): names under which clients ask for the model; the first is reported.
    - ``api_keys`` (none): a client must send one as ``Authorization: Bearer KEY``; without keys everyone is served.
    - ``max_body_bytes`` (64 MiB): a longer body is answered 413, unread where its length is announced.
    - ``max_held_bytes`` (three times ``max_body_bytes``, 192 MiB at least): bodies of all requests together, from their
      first byte until the request ends; more is answered 503. Bodies beyond 1 MiB have three quarters of it, and a
      client no more than it leaves to others, beyond which it gets 429. One body of ``max_body_bytes`` must fit.
    - ``body_timeout_s`` (s, 60): a body that is not there by then is answered 408; one that comes at less than 8 KiB/s
      has 10 s and what that rate allows.
    - ``max_connections`` (None): connections that ``trinity serve`` has open at once; None derives it from the limit of
      open files. At the limit an idle one makes room for a new one, or new ones wait.
    - ``send_timeout_s`` (s, 60): a client that reads nothing for so long is left, and its request ended.
    - ``deadline_s`` (s, None): longest time of a request, which may itself ask for less (``deadline_s``).
    - ``stalled_after_s`` (s, 30): a part whose oldest work is older, and that has ended none for as long, is named by
      /ready, which answers 503.
    - ``max_choices`` (16): largest ``n``, and most prompts of one request times ``n``.
    - ``tool_format`` ("auto"): how the model writes tool calls: "hermes", "llama3_json", "qwen3_coder" or "none";
      "auto" looks at the chat template.
    - ``live`` (True): serve the live page at /live. Without keys everyone who reaches the server sees it.
    - ``trusted_proxies`` (none): networks such as "10.0.0.0/8" whose X-Forwarded-For, or else Forwarded, has the
      address that a request comes from. Clients without keys differ by address; an IPv6 network of 64 bits is one.
    - ``tracer_provider`` (None): an OpenTelemetry ``TracerProvider`` for the spans of requests; by default the
      program's own, once it has set one.
    """

    def __init__(
        self,
        *,
        models: Sequence[str] = (),
        api_keys: Sequence[str] = (),
        max_body_bytes: Whole = 64 << 20,
        max_held_bytes: Whole | None = None,
        body_timeout_s: Positive = 60.0,
        max_connections: Whole | None = None,
        send_timeout_s: Positive = 60.0,
        deadline_s: Positive | None = None,
        stalled_after_s: Positive = 30.0,
        max_choices: Whole = 16,
        tool_format: ToolFormat = "auto",
        live: bool = True,
        trusted_proxies: Sequence[str] = (),
        tracer_provider: Any = None,
    ) -> None:
        self.models, self.api_keys = tuple(models), tuple(api_keys)
        self.max_body_bytes = max_body_bytes
        self.max_held_bytes = max_held_bytes or max(HELD_BYTES, 3 * max_body_bytes)
        self._check_held_bytes()
        self.body_timeout_s, self.send_timeout_s, self.deadline_s = body_timeout_s, send_timeout_s, deadline_s
        self.max_connections, self.stalled_after_s = max_connections, stalled_after_s
        self.max_choices, self.tool_format, self.live = max_choices, tool_format, live
        self.trusted_proxies, self.tracer_provider = read_networks(trusted_proxies), tracer_provider

    def _check_held_bytes(self) -> None:
        """Raise ``ConfigError`` if a client's largest body would be refused where nothing else is held."""
        needed = 2 * self.max_body_bytes  # a client has no more than it leaves to others
        if find_room(self.max_held_bytes, self.max_body_bytes) < needed:
            least = needed if self.max_body_bytes <= SHORT_BODY else -(-4 * needed // 3)
            raise ConfigError(
                f"max_held_bytes is {self.max_held_bytes}, too small for one body of max_body_bytes, "
                f"{self.max_body_bytes}; give max_held_bytes at least {least}, leave it out, or lower max_body_bytes"
            )


def find_room(max_held_bytes: int, size: int) -> int:
    """Return the bytes that all bodies may have together for one of ``size`` bytes to be among them.

    A quarter is for short bodies, so that long ones never keep out texts.
    """
    return max_held_bytes if size <= SHORT_BODY else 3 * max_held_bytes // 4
