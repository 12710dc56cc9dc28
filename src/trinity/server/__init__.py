"""An OpenAI-compatible server as an ASGI app, to mount in a program or to run: ``trinity.server.app(pipe)``.

Extra ``server``. ``read_chat_body`` needs no extra: it turns the body of a chat completion into a ``trinity.Request``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity.errors import ConfigError, pip_install
from trinity.server.fields import read_chat_body as read_chat_body
from trinity.server.settings import ServerConfig as ServerConfig

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from trinity.pipeline import Pipeline

__all__ = ["ServerConfig", "app", "read_chat_body"]


def app(pipe: Pipeline, config: ServerConfig | None = None) -> Starlette:
    """Make the ASGI app that serves a pipeline's model to OpenAI's clients.

    - ``pipe``: a pipeline. Who makes it starts and closes it, on the loop that serves the app.
    - ``config`` (``ServerConfig()``): names, keys, bounds.

    ::

        async with trinity.Pipeline("path/to/llava", placement="1E2P1D") as pipe:
            await uvicorn.Server(uvicorn.Config(trinity.server.app(pipe), port=8000)).serve()

    Raises ``ConfigError`` where the extra is not installed.
    """
    try:
        from trinity.server.application import make_app
    except ModuleNotFoundError as error:
        raise ConfigError(f"the server needs {error.name}: {pip_install('server')}") from error
    return make_app(pipe, config or ServerConfig())
