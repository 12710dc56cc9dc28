"""Errors as HTTP: one table from an error's type to a status, and the body that OpenAI's clients read."""

from __future__ import annotations

import logging
from typing import NamedTuple

import msgspec

from trinity import errors
from trinity.errors import shorten_message

logger = logging.getLogger("trinity.server")
RETRY_AFTER_S = 1  # a step or two: the queue moves that fast, and a client backs off by itself
LOADING_RETRY_S = 5  # of two tries, which OpenAI's client makes, one comes after a small model is there


class ApiError(Exception):
    """A problem of the HTTP request itself, which no part of the library knows.

    - ``status``: of the response; ``code``: for programs.
    - ``param`` (None): the field at fault.
    - ``headers`` (none): further ones of the response.
    """

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(shorten_message(message))
        self.status, self.code, self.param, self.headers = status, code, param, headers or {}


class ErrorRow(NamedTuple):
    """A row of the table: errors of a type, the status and the code that a client sees."""

    error: type[BaseException]
    status: int
    code: str


ERROR_TABLE = (
    ErrorRow(errors.RequestTooLarge, 413, "context_length_exceeded"),
    ErrorRow(errors.BadMedia, 400, "invalid_media"),
    ErrorRow(errors.Overloaded, 429, "overloaded"),
    ErrorRow(errors.DeadlineExceeded, 504, "deadline_exceeded"),
    ErrorRow(errors.PoisonRequest, 422, "poison_request"),
    ErrorRow(errors.ResumeError, 409, "not_resumed"),
    ErrorRow(errors.StageError, 500, "stage_failed"),
    ErrorRow(errors.MigrationError, 500, "migration_failed"),
    ErrorRow(errors.RequestError, 400, "invalid_request"),
    ErrorRow(errors.ClosedError, 503, "unavailable"),
    ErrorRow(errors.ConfigError, 500, "misconfigured"),
    ErrorRow(BaseException, 500, "internal_error"),
)
"""The first row whose type an error has is its own."""

ERROR_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 504: "timeout_error"}


class ErrorBody(msgspec.Struct):
    """The error in OpenAI's form."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(msgspec.Struct):
    """The response of an error: ``{"error": {...}}`` under a status."""

    error: ErrorBody
    status: int = 500
    headers: dict[str, str] = {}

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.error})


def describe_failure(error: BaseException, request_id: str = "") -> ErrorReply:
    """Describe an error for a client. Of one that is no fault of the client's, the text goes to the log alone."""
    if isinstance(error, ApiError):
        return _reply(error.status, str(error), error.code, error.param, error.headers)
    row = next(row for row in ERROR_TABLE if isinstance(error, row.error))
    status, code = row.status, row.code
    if isinstance(error, errors.Overloaded) and hasattr(error, "stage"):
        status, code = 503, "no_instance"
    if isinstance(error, errors.ResumeError) and error.reason == "unknown":
        status, code = 404, "resume_unknown"
    if isinstance(error, errors.PoisonRequest):  # clients try again after 5xx by themselves, and it must not come again
        logger.error("request %s was refused", request_id, exc_info=error)
    if status == 500:
        logger.error("request %s failed", request_id, exc_info=error)
        return _reply(status, f"the server failed on this request; its log says why, under {request_id}", code)
    headers = {"retry-after": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    return _reply(status, str(error), code, None, headers)


def _reply(
    status: int, message: str, code: str, param: str | None = None, headers: dict[str, str] | None = None
) -> ErrorReply:
    kind = ERROR_KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return ErrorReply(ErrorBody(message, kind, param, code), status, headers or {})
