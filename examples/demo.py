"""Ask a small trained model about pictures under every disaggregation method and transport, and compare the answers.

python examples/demo.py                the model of coloured shapes that comes with trinity; writes build/demo.html
python examples/demo.py --model DIR    your own checkpoint, on four photographs
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two spinning threads on two busy cores cost four times the time

import msgspec

import trinity
from trinity.demo import SHAPES_MODEL
from trinity.demo.accuracy import ANSWER_TOKENS, EXAM_SEED, ExamQuestion, Marks, make_exam
from trinity.demo.pictures import CORNERS
from trinity.demo.questions import QUESTION_KINDS
from trinity.preprocess.processor import RequestProcessor
from trinity.remote.supervision.process_config import kept_launcher
from trinity.testing.oracle import Oracle
from trinity.transport.base import Remote
from trinity.transport.inproc import InprocTransport

PHOTOS = sorted((Path(__file__).parent / "photos").glob("*.jpg"))
QUESTIONS = ("What is in this photo?", "Describe the scene.", "Which colours do you see?", "What happens here?")
OF_A_KIND = 8  # questions about shapes, of each kind
METHODS = ("EPD", "EP+D", "ED+P", "E+P+D")
TEXT_METHODS = ("PD", "P+D")  # of a model that takes no images
IN_PROCESSES = ("E+P+D", "ED+P")  # these again, each instance in a process of its own
COLUMNS = ("method", "TTFT ms", "ITL ms", "image moves", "KV moves", "in cache", "MiB moved", "equal to generate()")
TRANSFERS = ("transport", "blocks of", "transfers", "pieces", "MiB", "median ms", "GB/s")
NEEDS = {"shm": "mmap", "nixl": "nixl_cu13", "ucx": "ucxx"}  # the module that each transport needs
SCHEMES = tuple(scheme for scheme, module in NEEDS.items() if find_spec(module))

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
body { font: 16px/1.45 system-ui, sans-serif; color: #16181d; background: #f5f6f8; max-width: 76rem; margin: 0 auto;
  padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; } p { margin: .3rem 0; }
table { border-collapse: collapse; background: #fff; display: block; overflow-x: auto; width: fit-content;
  max-width: 100%; }
th, td { border: 1px solid #dfe2e7; padding: .3rem .8rem; text-align: left; white-space: nowrap; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: .9rem; }
.card { background: #fff; border: 1px solid #dfe2e7; border-radius: .5rem; overflow: hidden; }
.card img { display: block; width: 100%; aspect-ratio: 1; } .card div { padding: .6rem .8rem .8rem; }
.kind, .blank { color: #5b6270; font-size: .85rem; }
.right { color: #0a6b2b; font-weight: 600; } .wrong { color: #b3261e; font-weight: 600; }
"""


# ---------------------------------------------------------------- what is asked


def pick_exam() -> list[ExamQuestion]:
    """Questions about pictures that the model has never seen, as many of each kind."""
    drawn = make_exam(40 * OF_A_KIND, EXAM_SEED)
    kinds = [[each for each in drawn if each.question.kind == kind][:OF_A_KIND] for kind in QUESTION_KINDS]
    return [each for row in zip(*kinds, strict=True) for each in row]


def exam_requests(exam: Sequence[ExamQuestion]) -> list[trinity.Request]:
    return [trinity.Request(messages=each.messages, images=[each.picture()], max_tokens=ANSWER_TOKENS) for each in exam]


def photo_requests(multimodal: bool, max_tokens: int) -> list[trinity.Request]:
    """One request per photograph and one about all of them; or the questions alone."""
    if multimodal:
        asked = [(f"<image>\n{question}", [photo]) for photo, question in zip(PHOTOS, QUESTIONS, strict=False)]
        asked.append(("<image>" * len(PHOTOS) + "\nWhat do these have in common?", PHOTOS))
    else:
        asked = [(question.replace("photo", "sentence"), []) for question in QUESTIONS]
    return [trinity.Request(text, images=photos, max_tokens=max_tokens) for text, photos in asked]


def describe(request: trinity.Request) -> str:
    if request.messages is not None:
        return str(request.messages[-1]["content"][-1]["text"])
    return ", ".join(photo.name for photo in request.images) or str(request.prompt)


# ---------------------------------------------------------------- serving it


async def show(pipe: trinity.Pipeline, request: trinity.Request) -> trinity.Output:
    """Stream one answer to the terminal."""
    async with pipe.stream(request) as tokens:
        print(f"  {describe(request)}: ", end="")
        async for token in tokens:
            print(token.text.replace("\n", " "), end="", flush=True)
        print()
        return tokens.output


async def serve(
    model: Path, method: str, asked: list[trinity.Request], shown: int, **settings: Any
) -> list[trinity.Output]:
    """All requests at once, batched and interleaved by the stages; one of them is streamed for you to see."""
    asked = [msgspec.structs.replace(request, request_id=f"{request.request_id}.{method}") for request in asked]
    async with trinity.Pipeline(model, placement=method, dtype="float32", **settings) as pipe:
        processes = {name: f" (process {instance.process})" for name, instance in pipe.processes.items()}
        print(f"\n{method}: instances {', '.join(each.name + processes.get(each.name, '') for each in pipe.instances)}")
        answers = [(show if index == shown else trinity.Pipeline.complete)(pipe, r) for index, r in enumerate(asked)]
        return list(await asyncio.gather(*answers))


async def serve_in_processes(
    model: Path, asked: list[trinity.Request], methods: tuple[str, ...]
) -> dict[str, list[trinity.Output]]:
    """The same requests, each instance in a process of its own, over every transport that runs here."""
    served = {}
    async with kept_launcher():
        for scheme in SCHEMES:
            for method in methods:
                settings = {"hosting": "process", "connector": scheme}
                served[f"{method}@{scheme}"] = await serve(model, method, asked, -1, **settings)
    return served


async def serve_everywhere(
    model: Path, asked: list[trinity.Request], multimodal: bool
) -> dict[str, list[trinity.Output]]:
    methods = METHODS if multimodal else TEXT_METHODS
    served = {method: await serve(model, method, asked, shown) for shown, method in enumerate(methods)}
    return served | await serve_in_processes(model, asked, IN_PROCESSES if multimodal else TEXT_METHODS[1:])


# ---------------------------------------------------------------- the control: a picture that is lost on its way


class BlankingRemote:
    """A peer's pool whose blocks arrive, and are zeroed then."""

    def __init__(self, remote: Remote, into: Any) -> None:
        self.remote, self.into = remote, into

    async def read(self, source: Sequence[int], target: Sequence[int], within: Any = None) -> int:
        moved = await self.remote.read(source, target, within)
        self.into.tensor[list(target)] = 0
        return moved

    async def generation(self, source: Sequence[int]) -> int:
        return await self.remote.generation(source)

    async def aclose(self) -> None:
        await self.remote.aclose()


class Blanking(InprocTransport):
    """A transport that loses what it moves."""

    scheme = "blanking"

    async def attach(self, descriptor: bytes, into: Any) -> Any:
        return BlankingRemote(await super().attach(descriptor, into), into)


async def ask_blindly(model: Path, asked: list[trinity.Request]) -> list[str]:
    """The answers where features of images are zeroed between the instance that encodes and the one that reads them."""
    medium = {"image": Blanking(), "kv": "inproc"}
    return [output.text for output in await serve(model, "E+PD", asked, -1, connector=medium)]


# ---------------------------------------------------------------- the page


class Card(NamedTuple):
    """One question with the answer it got, and the answer without the picture ("" where that was not asked)."""

    asked: ExamQuestion
    answer: str
    blank_answer: str = ""


def render_page(title: str, summary: Iterable[str], table: Sequence[Sequence[str]], cards: Iterable[Card]) -> str:
    """Render a page that loads nothing and runs no script.

    title: its heading.
    summary: sentences below it.
    table: rows of text, the first of them the names of the columns.
    cards: one for each picture.
    """
    words = "\n".join(f"<p>{escape(each)}</p>" for each in summary)
    shown = "\n".join(map(_render_card, cards))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n{words}\n"
        f"<h2>The same tokens everywhere</h2>\n{_render_table(table)}\n<h2>Questions and answers</h2>\n"
        f'<div class="cards">\n{shown}\n</div>\n</body></html>\n'
    )


def _render_table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in body]
    names = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return f"<table><tr>{names}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _render_card(card: Card) -> str:
    scene, question = card.asked.scene, card.asked.question
    right = card.asked.is_right(card.answer)
    mark = "✓" if right else f"✗ (truth: {question.answer})"
    blank = f'<p class="blank">without the picture: {escape(card.blank_answer)}</p>' if card.blank_answer else ""
    return (
        f'<div class="card"><img alt="{escape(scene.describe())}" src="{_embed(card.asked.picture())}"><div>'
        f'<p class="kind">{question.kind}</p><p>{escape(question.text)}</p>'
        f'<p class="{"right" if right else "wrong"}">{escape(card.answer)} {escape(mark)}</p>{blank}</div></div>'
    )


def _embed(image: Any) -> str:
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"


# ---------------------------------------------------------------- what it shows


def row(method: str, outputs: list[trinity.Output], wanted: list[list[int]]) -> tuple[str, ...]:
    """One line of the table."""
    moved = [record for output in outputs for record in output.transfers]
    pulled = [record["kind"] for record in moved if record["outcome"] == "pulled"]
    equal = sum(output.token_ids == ids for output, ids in zip(outputs, wanted, strict=True))
    return (
        method,
        f"{median(output.ttft_s or 0.0 for output in outputs) * 1e3:.1f}",
        f"{median([gap for output in outputs for gap in output.itl_s] or [0.0]) * 1e3:.2f}",
        str(pulled.count("image")),
        str(pulled.count("kv")),
        str(len(moved) - len(pulled)),
        f"{sum(record['bytes'] for record in moved) / 2**20:.2f}",
        f"{equal} of {len(outputs)}",
    )


def table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in [columns, *rows]
    )


def transfers(outputs: list[trinity.Output]) -> list[tuple[str, ...]]:
    """One line per transport and kind of block."""
    pulled = [record for output in outputs for record in output.transfers if record["outcome"] == "pulled"]
    lines: list[tuple[str, ...]] = []
    for scheme, kind in sorted({(record["scheme"], record["kind"]) for record in pulled}):
        these = [each for each in pulled if (each["scheme"], each["kind"]) == (scheme, kind)]
        moved, seconds = sum(each["bytes"] for each in these), sum(each["seconds"] for each in these)
        middle = f"{median(each['seconds'] for each in these) * 1e3:.3f}"
        pieces = str(sum(each["pieces"] for each in these))
        lines.append(
            (scheme, kind, str(len(these)), pieces, f"{moved / 2**20:.2f}", middle, f"{moved / seconds / 1e9:.2f}")
        )
    return lines


def draw_answers(exam: Sequence[ExamQuestion], answers: Sequence[str]) -> str:
    """The first question of each kind: its picture in words, corner by corner, the answer and the truth."""
    lines = []
    for each, answer in list(zip(exam, answers, strict=True))[: len(QUESTION_KINDS)]:
        names = {shape.corner: shape.name for shape in each.scene.shapes}
        top, bottom = (
            " | ".join(names.get(corner, "").ljust(15) for corner in row) for row in (CORNERS[:2], CORNERS[2:])
        )
        lines += [
            f"{each.question.kind:10}{each.question.text}",
            f"{'':10}[ {top} ]  answer: {answer.strip()}{'' if each.is_right(answer) else '   WRONG'}",
            f"{'':10}[ {bottom} ]  truth:  {each.question.answer}",
        ]
    return "\n".join(lines)


def chance_of(exam: Sequence[ExamQuestion]) -> float:
    """The share that is right by guessing: by a question's own kind, as often as each answer is right in the exam."""
    kinds = [[each.question.answer for each in exam if each.question.kind == kind] for kind in QUESTION_KINDS]
    return sum(answers.count(answer) / len(answers) for answers in kinds for answer in answers) / len(exam)


class Served(NamedTuple):
    """Outputs of each method, the rows of the table about them, and if all tokens are those of generate()."""

    outputs: dict[str, list[trinity.Output]]
    rows: list[tuple[str, ...]]
    equal: bool


async def compare(model: Path, asked: list[trinity.Request], multimodal: bool) -> Served:
    """Serve the requests everywhere, and print the tables."""
    print("First the model's own generate() in float32, then trinity.")
    wanted = await asyncio.to_thread(lambda: Oracle(model).generate_all(asked))
    served = await serve_everywhere(model, asked, multimodal)
    rows = [row(method, outputs, wanted) for method, outputs in served.items()]
    print("\n" + table(COLUMNS, rows))
    print("\n" + table(TRANSFERS, transfers([output for outputs in served.values() for output in outputs])))
    return Served(served, rows, all([each.token_ids for each in outputs] == wanted for outputs in served.values()))


async def run_shapes(page: Path) -> bool:
    """The model that comes with trinity: right answers, the same everywhere, and wrong ones where images are lost."""
    exam = pick_exam()
    asked = exam_requests(exam)
    print(f"{len(exam)} questions about pictures that the model has never seen, {OF_A_KIND} of each kind.")
    served = await compare(SHAPES_MODEL, asked, multimodal=True)
    answers = [output.text for output in served.outputs[METHODS[0]]]
    blind = await ask_blindly(SHAPES_MODEL, asked)
    lines = (
        f"Right: {Marks.of(exam, answers)}",
        f"Right where image blocks are zeroed on their way: {Marks.of(exam, blind).share:.1%}",
        f"Right by guessing: {chance_of(exam):.1%}",
    )
    print("\n" + draw_answers(exam, answers) + "\n\n" + "\n".join(lines))
    cards = [Card(*each) for each in zip(exam, answers, blind, strict=True)]
    page.parent.mkdir(parents=True, exist_ok=True)
    html = render_page("trinity: a model of shapes, disaggregated", lines, [COLUMNS, *served.rows], cards)
    page.write_text(html, encoding="utf-8")
    print(f"All pictures and answers: {page}")
    return served.equal


async def run_photos(model: Path, max_tokens: int) -> bool:
    """A checkpoint of your own, about photographs."""
    multimodal = (await asyncio.to_thread(RequestProcessor, model)).multimodal
    asked = photo_requests(multimodal, max_tokens)
    print(f"{len(asked)} requests {f'about {len(PHOTOS)} photographs' if multimodal else 'of text alone'}.")
    return (await compare(model, asked, multimodal)).equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint directory in transformers' format")
    parser.add_argument("--max-tokens", type=int, default=48, help="of each answer about photographs")
    parser.add_argument(
        "--page", type=Path, default=Path("build/demo.html"), help="where the page of pictures is written"
    )
    given = parser.parse_args()
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    running = run_photos(given.model, given.max_tokens) if given.model else run_shapes(given.page)
    try:
        equal = asyncio.run(running)
    except trinity.TrinityError as error:
        parser.exit(2, f"demo: {error}\n")
    print("\nEvery token equals generate()." if equal else "\nTOKENS DIFFER from generate().")
    raise SystemExit(0 if equal else 1)


if __name__ == "__main__":
    main()
