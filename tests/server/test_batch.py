"""``trinity batch``: OpenAI's batch lines into answers that OpenAI's types read; bad lines, and stopped runs."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support.checkpoint_files import checkpoint
from support.emulated_pipelines import LIVENESS_S
from support.pipeline_driver import nothing_left, picture
from support.pipeline_options import pipeline_options
from trinity.commands import main
from trinity.errors import ConfigError
from trinity.pipeline import Pipeline
from trinity.server.batch import Answers, serve_batch

pytestmark = pytest.mark.xdist_group("llava")
openai = pytest.importorskip("openai", reason="openai is not installed: a development dependency")


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def pipe(runner: asyncio.Runner) -> Iterator[Pipeline]:
    settings = pipeline_options({"pools": {"image": 16, "kv": 256}})
    started = Pipeline(checkpoint("llava"), "EPD", dtype="float32", **settings)
    runner.run(started.start())
    yield started
    runner.run(started.aclose())
    nothing_left(started)


def image_url() -> str:
    with BytesIO() as file:
        Image.fromarray(picture(1)).save(file, "PNG")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def line(custom_id: str, said: Any = "Hello", **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": said}], "max_tokens": 4, "ignore_eos": True, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines) + "\n")
    return path


def serve(runner: asyncio.Runner, pipe: Pipeline, source: Path, out: Path, **options: Any) -> dict[str, int]:
    answers = Answers(out)
    try:
        runner.run(serve_batch(pipe, source, answers, options.get("concurrency", 8), trusted=False))
    finally:
        answers.close()
    return answers.counts


def read(out: Path) -> dict[str, Any]:
    return {str(each["custom_id"] or each["id"]): each for each in map(json.loads, out.read_text().splitlines())}


def test_answers_are_chat_completions_with_the_pipelines_tokens(
    pipe: Pipeline, runner: asyncio.Runner, tmp_path: Path
) -> None:
    seen = [{"type": "image_url", "image_url": {"url": image_url()}}, {"type": "text", "text": "What is this?"}]
    several = line("several", n=3, seed=5, temperature=1.0, logprobs=True, top_logprobs=2)
    source = write(tmp_path / "in", line("text"), line("image", seen), several)
    assert serve(runner, pipe, source, tmp_path / "out") == {"answered": 3, "refused": 0, "failed": 0}
    found = read(tmp_path / "out")
    bodies = {}
    for name, each in found.items():
        assert (each["error"], each["response"]["status_code"]) == (None, 200)
        bodies[name] = openai.types.chat.ChatCompletion.model_validate(each["response"]["body"])
    message = [{"role": "user", "content": "Hello"}]
    alone = runner.run(pipe.chat(message, max_tokens=4, ignore_eos=True))
    assert bodies["text"].choices[0].message.content == alone.text
    assert bodies["text"].usage.completion_tokens == 4
    assert bodies["image"].usage.prompt_tokens > bodies["text"].usage.prompt_tokens
    drawn = [pipe.chat(message, max_tokens=4, ignore_eos=True, temperature=1.0, seed=5 + at) for at in range(3)]
    wanted = [runner.run(each).text for each in drawn]
    assert [each.message.content for each in bodies["several"].choices] == wanted
    assert [each.index for each in bodies["several"].choices] == [0, 1, 2]
    content = bodies["several"].choices[0].logprobs.content
    assert len(content) == 4
    assert all(len(each.top_logprobs) == 2 for each in content)


def test_a_bad_line_has_an_error_of_its_own(pipe: Pipeline, runner: asyncio.Runner, tmp_path: Path) -> None:
    lines = [
        line("good"),
        "{not json",
        "[1, 2]",
        line("good"),
        {**line("elsewhere"), "url": "/v1/embeddings"},
        line(""),
        line("field", echo=True),
        line("streamed", stream=True),
        line("path", [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]),
        line("long", "word " * 5000),
        line("many", n=1000),
    ]
    source = write(tmp_path / "in", *lines)
    assert serve(runner, pipe, source, tmp_path / "out") == {"answered": 1, "refused": 10, "failed": 0}
    found = read(tmp_path / "out")
    for number in (2, 3, 4, 5, 6):
        each = found[f"batch-{number}"]
        assert (each["custom_id"], each["response"], each["error"]["code"]) == (None, None, "invalid_line")
        assert each["error"]["message"].startswith(f"line {number}: ")
    statuses = {name: found[name]["response"]["status_code"] for name in ("field", "streamed", "path", "long", "many")}
    assert statuses == {"field": 400, "streamed": 400, "path": 400, "long": 413, "many": 400}
    assert "passwd" not in found["path"]["response"]["body"]["error"]["message"]
    assert found["good"]["response"]["status_code"] == 200
    again = serve(runner, pipe, source, tmp_path / "out")
    assert again == {"answered": 0, "refused": 0, "failed": 0}, "every line has its answer"


def test_a_line_that_has_changed_since_its_answer_is_told(
    pipe: Pipeline, runner: asyncio.Runner, tmp_path: Path
) -> None:
    """The former answer was taken for the new body's, silently."""
    source, out = write(tmp_path / "in", line("a"), line("b")), tmp_path / "out"
    serve(runner, pipe, source, out)
    had = out.read_bytes()
    write(source, line("a"), line("b", "Bye"))
    with pytest.raises(ConfigError, match=r"custom_id 'b' has an answer, and its body has changed since; give"):
        serve(runner, pipe, source, out)
    assert out.read_bytes() == had
    write(source, {**line("a"), "body": dict(reversed(line("a")["body"].items()))}, line("c", "Bye"))
    assert serve(runner, pipe, source, out)["answered"] == 1, "the order of a body's fields is no change"


def test_a_line_of_too_many_values_is_not_parsed(pipe: Pipeline, runner: asyncio.Runner, tmp_path: Path) -> None:
    full = '{"custom_id": "a", "body": {"messages": [' + "[]," * (1 << 21) + "[]]}}"
    source = write(tmp_path / "in", full, line("b"))
    assert serve(runner, pipe, source, tmp_path / "out") == {"answered": 1, "refused": 1, "failed": 0}
    assert "more than 1 MiB outside strings" in read(tmp_path / "out")["batch-1"]["error"]["message"]


def test_a_custom_id_may_be_the_name_of_another_line(pipe: Pipeline, runner: asyncio.Runner, tmp_path: Path) -> None:
    """A line without one is known by its number, which is nobody else's name."""
    source, out = write(tmp_path / "in", line("batch-2")), tmp_path / "out"
    serve(runner, pipe, source, out)
    write(source, line("batch-2"), "{not json", line("batch-3"))
    assert serve(runner, pipe, source, out) == {"answered": 1, "refused": 1, "failed": 0}


def test_a_run_that_was_stopped_goes_on(pipe: Pipeline, runner: asyncio.Runner, tmp_path: Path) -> None:
    source = write(tmp_path / "in", *(line(f"c{at}", f"Say {at}") for at in range(12)))
    whole, out = tmp_path / "whole", tmp_path / "out"
    serve(runner, pipe, source, whole)

    async def stop_early(answers: Answers) -> None:
        serving = asyncio.ensure_future(serve_batch(pipe, source, answers, 2, trusted=False))
        async with asyncio.timeout(LIVENESS_S):
            while not answers.counts["answered"]:
                await asyncio.sleep(0.001)
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving

    answers = Answers(out)
    runner.run(stop_early(answers))
    answers.close()
    had = out.read_bytes()
    assert 1 <= had.count(b"\n") < 12
    with out.open("ab") as file:
        file.write(b'{"id":"batch-9","cust')
    counts = serve(runner, pipe, source, out)
    assert counts["answered"] == 12 - had.count(b"\n")
    assert out.read_bytes().startswith(had)
    texts = [
        {name: each["response"]["body"]["choices"][0]["message"]["content"] for name, each in read(path).items()}
        for path in (out, whole)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 12


def test_the_command_serves_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in", line("a"), "{")
    assert main(["batch", str(checkpoint("llava")), str(source), str(tmp_path / "out")]) == 0
    assert "1 answered, 1 refused, 0 failed" in capsys.readouterr().err
    assert read(tmp_path / "out")["a"]["response"]["status_code"] == 200
    write(tmp_path / "foreign", "something else")
    for arguments, said in (
        ([str(tmp_path / "nothing"), str(tmp_path / "out")], "cannot read"),
        ([str(source), str(tmp_path / "foreign")], "is no answer of a batch"),
    ):
        assert main(["batch", str(checkpoint("llava")), *arguments]) == 2
        assert said in capsys.readouterr().err
