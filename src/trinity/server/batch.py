"""Command: ``trinity batch MODEL IN OUT`` serves OpenAI's batch lines; a run that was stopped goes on where it was."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trinity.errors import ConfigError, RequestError, TrinityError
from trinity.pipeline import Pipeline
from trinity.pipeline.copies import copy_request
from trinity.pipeline.results_file import LinesFile
from trinity.request import Output, Request, Token
from trinity.runtime.shielded_wait import run_to_end
from trinity.server.body_values import TooManyValues, decode_json
from trinity.server.chat_reply import ChatReply
from trinity.server.error_table import describe_failure
from trinity.server.fields import ParsedCall, complete_request, read_chat_call
from trinity.server.token_texts import TokenTexts
from trinity.server.tool_calls import choose_format, template_of

CHAT_URL = "/v1/chat/completions"
_HEAD = b'{"id":'
_LONGEST_LINE = 1 << 28  # bytes: images come in it
_LONGEST_NAME = 512  # characters of a custom_id
_OWN_FAULT = 500  # statuses from here on are not the line's fault: it is left for the next run
_EXAMPLE = """example, a line of IN:
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}}
then:
  trinity batch path/to/llava in.jsonl out.jsonl --placement 1E1P1D
OUT gets a line for each, as they end. Run again after a stop: lines that OUT answers already are not served again."""


class BatchLine(msgspec.Struct):
    """One line of OpenAI's batch files."""

    custom_id: str
    body: dict[str, Any]
    method: str = "POST"
    url: str = CHAT_URL

    def digest(self) -> str:
        """Hash the body: it tells that a line answered in a former run has changed since."""
        return hashlib.blake2b(msgspec.json.encode(self.body, order="deterministic"), digest_size=12).hexdigest()


class OpenLine(NamedTuple):
    """A line that is being served, and the outputs of its choices so far."""

    line: BatchLine
    call: ParsedCall
    results: dict[str, Output | RequestError]


class Answers:
    """The file of answers. Its calls block, and may come from any thread."""

    def __init__(self, path: Path) -> None:
        self._file, self._lock = LinesFile(path, _HEAD), threading.Lock()
        self.done: dict[str, str] = {}  # digests of bodies by custom_id, "" where the file has none
        self.refused: set[str] = set()  # names of lines that have none
        self.counts = {"answered": 0, "refused": 0, "failed": 0}
        try:
            for number, (_, line) in enumerate(self._file.lines(), 1):
                name, custom_id, digest = _read_names(path, number, line)
                if custom_id is None:
                    self.refused.add(name)
                else:
                    self.done[custom_id] = digest
        except BaseException:
            self.close()
            raise

    def has(self, line: BatchLine) -> bool:
        """Tell if a former run has answered this line. Raises ``ConfigError`` if its body was another then."""
        kept = self.done.get(line.custom_id)
        if kept and kept != line.digest():
            text = f"custom_id {line.custom_id[:99]!r} has an answer, and its body has changed since"
            raise ConfigError(f"{text}; give it another custom_id, or another file for the answers")
        return kept is not None

    def answer(self, name: str, line: BatchLine, status: int, body: bytes) -> None:
        """Append the response to a line; ``body`` is JSON."""
        response = {"status_code": status, "request_id": name, "body": msgspec.Raw(body)}
        written = {"id": name, "custom_id": line.custom_id, "response": response, "error": None}
        self._append({**written, "body_digest": line.digest()}, "answered" if status == 200 else "refused")

    def refuse(self, name: str, why: str) -> None:
        """Append the error of a line that is no request, and so has no ``custom_id`` to be known by."""
        error = {"code": "invalid_line", "message": why}
        self._append({"id": name, "custom_id": None, "response": None, "error": error}, "refused")

    def _append(self, line: dict[str, Any], end: str) -> None:
        with self._lock:
            self._file.append(msgspec.json.encode(line))
            self.counts[end] += 1

    def close(self) -> None:
        self._file.close()


def _read_names(path: Path, number: int, line: bytes) -> tuple[str, str | None, str]:
    """Return the line's own name, which stands for its number, its custom_id (None if it had none) and its digest."""
    try:
        read = msgspec.json.decode(line)
        custom_id = None if read["custom_id"] is None else str(read["custom_id"])
        return str(read["id"]), custom_id, str(read.get("body_digest", ""))
    except (msgspec.MsgspecError, RecursionError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}, line {number} is no answer of a batch ({error}); give another file") from error


class BatchRequests:
    """Requests of the lines that have no answer yet; iterating reads the file, and answers the lines that are none.

    - ``pipe``: what serves them; started.
    - ``source``: the file.
    - ``answers``: of former runs, and of this one.
    - ``trusted``: images may be paths on this machine.

    Iterating and ``take`` block: they are for threads.
    """

    def __init__(self, pipe: Pipeline, source: Path, answers: Answers, *, trusted: bool) -> None:
        self._source, self._answers, self._trusted = source, answers, trusted
        tokenizer, defaults = pipe.processor.tokenizer, pipe.processor.defaults
        self._texts = TokenTexts(tokenizer)
        self._format = choose_format("auto", template_of(tokenizer))
        self._model = pipe.model.name if isinstance(pipe.model, Path) else str(pipe.model)
        self._limited = defaults.max_new_tokens is not None or defaults.max_length is not None
        self._open: dict[str, OpenLine] = {}
        self._left = max(0, sum(1 for _ in read_batch_lines(source)) - len(answers.done) - len(answers.refused))

    def __len__(self) -> int:
        return self._left

    def __iter__(self) -> Iterator[Request]:
        seen: set[str] = set()
        for number, line in read_batch_lines(self._source):
            name = f"batch-{number}"
            try:
                asked = _read_line(line)
                if asked.custom_id in seen:
                    raise RequestError(f"custom_id {asked.custom_id!r} is that of an earlier line")
            except RequestError as error:
                if name not in self._answers.refused:
                    self._answers.refuse(name, f"line {number}: {error}")
                continue
            seen.add(asked.custom_id)
            if not self._answers.has(asked):
                yield from self._requests(name, asked)

    def _requests(self, name: str, asked: BatchLine) -> list[Request]:
        """Make the requests of a line, one for each choice; none where its body is refused, which is its answer."""
        try:
            call = read_chat_call(asked.body)
            if call.stream:
                raise RequestError("a batch streams nothing; leave stream out")
            if call.tools.schemas and not (self._format or call.tools.forced):
                raise RequestError("this model's chat template shows no way of calling tools that is known")
            request = complete_request(call.requests[0], self._limited, None)
            copies = copy_request(
                msgspec.structs.replace(request, request_id=name, untrusted=not self._trusted), call.choices
            )
        except (RequestError, ConfigError) as error:
            self._answers.answer(name, asked, *_describe(error, name))
            return []
        self._open[name] = OpenLine(asked, call, {})
        return copies

    def take(self, result: Output | RequestError) -> None:
        """Take an output or its error; answer the line once it has all."""
        name = result.request_id.partition(".")[0]
        line = self._open[name]
        line.results[result.request_id] = result
        if len(line.results) < line.call.choices:
            return
        del self._open[name]
        status, body = self._reply(name, line)
        if status < _OWN_FAULT:
            self._answers.answer(name, line.line, status, body)
        else:
            self._answers.counts["failed"] += 1

    def _reply(self, name: str, line: OpenLine) -> tuple[int, bytes]:
        ordered = [line.results[each] for each in sorted(line.results, key=_choice_number)]
        outputs = [each for each in ordered if isinstance(each, Output)]
        if len(outputs) < len(ordered):
            return _describe(next(each for each in ordered if isinstance(each, RequestError)), name)
        reply = ChatReply(line.call, line.call.model or self._model, self._texts, self._format)
        return 200, reply.whole(outputs, [_tokens(each) for each in outputs], ())


def _choice_number(request_id: str) -> int:
    return int(request_id.partition(".")[2] or 0)


def _describe(error: TrinityError, name: str) -> tuple[int, bytes]:
    reply = describe_failure(error, name)
    return (400 if isinstance(error, ConfigError) else reply.status), reply.body()


def _tokens(output: Output) -> list[Token]:
    """List the tokens of an output with their log-probabilities, where those were asked for."""
    columns = zip(output.token_ids, output.logprobs, output.top_logprobs, strict=False)
    return [Token(token, "", index, logprob, top) for index, (token, logprob, top) in enumerate(columns)]


def read_batch_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Iterate over the lines of a file that hold anything, with their numbers. Raises ``ConfigError``."""
    try:
        with path.open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(_LONGEST_LINE + 1)
                if not line:
                    return
                if len(line) > _LONGEST_LINE:
                    raise ConfigError(f"{path}, line {number} has more than {_LONGEST_LINE:,} bytes")
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _read_line(line: bytes) -> BatchLine:
    """Read a line. Raises ``RequestError`` that says what is wrong with it."""
    try:
        asked = msgspec.convert(decode_json(line), BatchLine)
    except TooManyValues as problem:
        raise RequestError(f"it has {problem}; send less") from None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(f"it is no line of a batch ({error})") from None
    if not 0 < len(asked.custom_id) <= _LONGEST_NAME:
        raise RequestError(f"custom_id must have 1 to {_LONGEST_NAME} characters")
    if (asked.method, asked.url) != ("POST", CHAT_URL):
        raise RequestError(f"only POST {CHAT_URL} is served, not {asked.method[:9]} {asked.url[:99]}")
    return asked


async def serve_batch(pipe: Pipeline, source: Path, answers: Answers, concurrency: int, *, trusted: bool) -> None:
    """Serve the lines that have no answer, and append their answers as they end."""
    batch = await run_to_end(BatchRequests, pipe, source, answers, trusted=trusted)
    results = pipe.map(batch, concurrency=concurrency, ordered=False, on_error="return")
    async with aclosing(results):
        async for result in results:
            await run_to_end(batch.take, result)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve OpenAI's batch lines from one file into another; 1 where lines are left that the next run may answer."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="trinity batch", description=main.__doc__, epilog=_EXAMPLE, formatter_class=formatter
    )
    parser.add_argument("model", help="a checkpoint's directory, or a name on the hub that is in its cache")
    parser.add_argument("source", type=Path, metavar="IN", help="file of requests, a line of JSON each")
    parser.add_argument("out", type=Path, metavar="OUT", help="file of answers")
    parser.add_argument("--placement", default="EPD", help="EPD (default), 1E2P1D, ...")
    parser.add_argument("--hosting", choices=("thread", "process"), default="thread", help="of instances")
    parser.add_argument("--concurrency", type=int, default=256, help="requests served at once (default: 256)")
    parser.add_argument("--trusted", action="store_true", help="images may be paths on this machine")
    asked = parser.parse_args(arguments)
    answers = Answers(asked.out)
    try:
        asyncio.run(_run(asked, answers))
    finally:
        answers.close()
        print(", ".join(f"{count} {name}" for name, count in answers.counts.items()), file=sys.stderr)
    return 1 if answers.counts["failed"] else 0


async def _run(asked: argparse.Namespace, answers: Answers) -> None:
    next(read_batch_lines(asked.source), None)  # a file that is not there is told before weights are read
    async with Pipeline(asked.model, asked.placement, hosting=asked.hosting) as pipe:
        await serve_batch(pipe, asked.source, answers, asked.concurrency, trusted=asked.trusted)
