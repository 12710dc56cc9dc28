"""Contract of every stage, as the function ``check_stage``, without a test framework.

Call it from your own tests: ``check_stage(MyStage)``. It blocks for some seconds, and raises ``AssertionError``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trinity.core.messages import IMAGE, KV, STATE, Encode, Grow, Open, Prefill, Sampled, Step, Work
from trinity.core.values import blocks_for
from trinity.errors import StageError
from trinity.memory.block_memory import BlockMemory
from trinity.preprocess.processor import ProcessedRequest, RequestProcessor
from trinity.request import Request, Sampling
from trinity.stage_kinds import DECODE, ENCODE, PREFILL, all_letters, roles_of
from trinity.stages.base import GrowableStage, Stage, StageFactory, StageSetup
from trinity.stages.language import LanguageStage
from trinity.stages.models import LoadedModel, load_model
from trinity.testing.checkpoints import build_checkpoint

BLOCKS = 64
LEAST_ROWS = {IMAGE: 10, KV: 4}  # of a block
IMAGE_BLOCKS, TABLE_BLOCKS = 8, 24  # of an image and of a request, at most
OUTPUTS = 6
CLOSE = 1e-4  # float32, in another order of operations


@dataclass
class StageBench:
    """A stage on pools of its own, full of what earlier requests have left, and the prompts to run.

    ``prompts``: a text and two with an image each, or two texts where the model takes no images.
    """

    factory: StageFactory
    model: LoadedModel
    prompts: Sequence[ProcessedRequest]
    roles: str
    steps: count[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        longest = max((len(each.work.prompt) + OUTPUTS for each in self.prompts), default=0)
        largest = max((span.tokens for each in self.prompts for span in each.work.media), default=0)
        self.rows = {
            KV: max(LEAST_ROWS[KV], -(-longest // TABLE_BLOCKS)),
            IMAGE: max(LEAST_ROWS[IMAGE], -(-largest // IMAGE_BLOCKS)),
        }
        shapes = [
            self.model.kv_shape(self.rows[KV]),
            self.model.image_shape(self.rows[IMAGE]),
            self.model.state_shape(),
        ]
        self.memory = {shape.kind: BlockMemory(shape, BLOCKS) for shape in shapes if shape is not None}
        for each in self.memory.values():
            each.tensor.copy_(torch.rand(each.tensor.shape, generator=torch.Generator().manual_seed(1)))
        made: Any = self.factory(StageSetup(self.roles, self.model, self.memory))
        members = [name for name in ("letters", "open", "close", "forward") if not hasattr(made, name)]
        assert not members, f"a stage has letters, open, close and forward; {made!r:.100} lacks {', '.join(members)}"
        self.stage: Stage = made
        self.letters = made.letters
        fits = bool(self.letters) and sorted({*self.letters} & {*self.roles}) == sorted(self.letters)
        assert fits, f"letters are roles of the instance ({self.roles}), each once; got {self.letters!r}"

    def forward(self, **rows: Any) -> dict[str, Sampled]:
        """Run one step of the stage."""
        found = self.stage.forward(Step(next(self.steps), "joint", **rows))
        assert isinstance(found, dict), f"forward() returns samples by request, got {found!r:.100}"
        return found

    def encode(self, prompts: Sequence[ProcessedRequest], places: Sequence[Sequence[int]]) -> None:
        """Encode the image of each prompt in one step."""
        encodes = [
            Encode(prompt.work.request, 0, prompt.work.media[0], tuple(blocks), prompt.inputs[0])
            for prompt, blocks in zip(prompts, places, strict=True)
        ]
        assert not self.forward(encodes=tuple(encodes)), "a step of encodes alone samples no token"

    def image_blocks(self, prompt: ProcessedRequest) -> int:
        """Count the blocks of a prompt's image."""
        return blocks_for(prompt.work.media[0].tokens, self.rows[IMAGE])

    def features(self, prompt: ProcessedRequest, blocks: Sequence[int]) -> torch.Tensor:
        """Copy the feature rows [tokens, width] of a prompt's image."""
        found = self.memory[IMAGE].tensor[list(blocks)].flatten(0, 1)[: prompt.work.media[0].tokens]
        assert bool(found.isfinite().all()), "features hold NaN or infinity"
        return found.clone()

    def keys(self, work: Work, blocks: Sequence[int]) -> torch.Tensor:
        """Copy the keys and values [layers, 2, heads, positions, dim] of a prompt."""
        table = self.memory[KV].tensor[list(blocks)].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        return table[..., : len(work.prompt), :].clone()

    def open(self, work: Work, blocks: Sequence[int], tokens: Sequence[int] = ()) -> None:
        """Open a request on the stage; its image features are the same each time."""
        images: tuple[tuple[int, ...], ...] = ()
        if work.media and not tokens:
            first = IMAGE_BLOCKS * int(work.request)
            images = (tuple(range(first, first + blocks_for(work.media[0].tokens, self.rows[IMAGE]))),)
            made = torch.Generator().manual_seed(int(work.request))
            place = self.memory[IMAGE].tensor[list(images[0])]
            self.memory[IMAGE].tensor[list(images[0])] = torch.rand(place.shape, generator=made)
        state = (int(work.request),) if STATE in self.memory else ()
        self.stage.open(Open(work=work, blocks=tuple(blocks), images=images, tokens=tuple(tokens), state=state))

    def prefill(self, work: Work, blocks: Sequence[int], *borders: int) -> int:
        """Open and prefill a request in chunks that end at ``borders``; return its first token."""
        self.open(work, blocks)
        ends = [*borders, len(work.prompt)]
        for start, end in zip([0, *borders], ends, strict=True):
            last = end == len(work.prompt)
            found = self.forward(prefills=(Prefill(work.request, start, end - start, last),))
            wanted = [work.request] if last else []
            assert list(found) == wanted, f"a chunk to {end} of {ends[-1]} samples {list(found)}, not {wanted}"
        return found[work.request].token

    def start(self, work: Work, blocks: Sequence[int]) -> int:
        """Open a request to decode: its prompt is prefilled here, by trinity's own stage if this one has no P."""
        if roles_of(self.letters).prefills:
            return self.prefill(work, blocks)
        prefill = LanguageStage(self.model, self.memory[KV], None, PREFILL.letter, states=self.memory.get(STATE))
        token = StageBench(lambda setup: prefill, self.model, (), self.roles).prefill(work, blocks)
        self.open(work, blocks, tokens=[token])
        return token

    def decode(self, *requests: str) -> list[int]:
        """Decode a token of each of these in one step."""
        found = self.forward(decodes=requests)
        assert set(found) == set(requests), f"decodes of {requests} sampled for {list(found)}"
        return [found[request].token for request in requests]

    def table(self, work: Work, first: int = 0) -> list[int]:
        """List KV blocks for a whole request, in falling order and two apart: a table has any order."""
        needed = blocks_for(len(work.prompt) + work.max_tokens, self.rows[KV])
        return [first + 2 * index for index in reversed(range(needed))]

    def is_untouched(self, kind: str, blocks: Sequence[int], before: torch.Tensor) -> bool:
        """Tell if all blocks of a pool but these are as they were."""
        others = sorted(set(range(BLOCKS)) - set(blocks))
        return torch.equal(self.memory[kind].tensor[others], before[others])


StageCheck = Callable[[StageBench], None]


def check_stage(factory: StageFactory, *, model: str | Path | None = None, roles: str = all_letters()) -> None:
    """Check the stage that ``factory`` makes against the contract of ``Stage``, for each of its letters.

    - ``model`` (None): a checkpoint's directory; a tiny LLaVA is built where there is none. It is loaded in float32.
    - ``roles`` ("EPD"): of the instance, as ``StageSetup`` has them.

    Raises ``AssertionError`` naming what broke.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(model) if model is not None else build_checkpoint("llava", Path(folder) / "llava")
        loaded = load_model(source, roles, dtype="float32")
        prompts = _make_prompts(source, loaded.multimodal)
        letters = StageBench(factory, loaded, prompts, roles).letters
        for letter, checks in STAGE_CHECKS.items():
            for check in checks if letter in letters and (letter != ENCODE.letter or loaded.multimodal) else ():
                _run(check, StageBench(factory, loaded, prompts, roles))


def _run(check: StageCheck, bench: StageBench) -> None:
    try:
        check(bench)
    except AssertionError as error:
        raise AssertionError(f"{check.__name__}: {error}") from error
    except Exception as error:
        raise AssertionError(f"{check.__name__}: the stage raised {error!r}") from error


def _make_prompts(model: Path, multimodal: bool) -> list[ProcessedRequest]:
    draw, greedy = np.random.default_rng(0), Sampling(temperature=0, ignore_eos=True)
    processor = RequestProcessor(model)
    try:
        requests = [Request("Hello world, what a day", max_tokens=OUTPUTS, sampling=greedy, request_id="0")]
        if not multimodal:
            requests.append(Request("And another prompt", max_tokens=OUTPUTS, sampling=greedy, request_id="1"))
        for number in (1, 2) if multimodal else ():
            picture = draw.integers(0, 255, (56, 84, 3), dtype=np.uint8)
            requests.append(
                Request("<image> What?", images=[picture], max_tokens=OUTPUTS, sampling=greedy, request_id=str(number))
            )
        return [processor.process(request) for request in requests]
    finally:
        processor.close()


# ---------------------------------------------------------------- E


def features_fill_their_own_blocks(bench: StageBench) -> None:
    prompt, before = bench.prompts[1], bench.memory[IMAGE].tensor.clone()
    blocks = list(range(5, 5 + bench.image_blocks(prompt)))
    bench.encode([prompt], [blocks])
    assert bench.is_untouched(IMAGE, blocks, before), "blocks of other images were written"
    kept = before[blocks].flatten(0, 1)[: prompt.work.media[0].tokens]
    assert not bool((bench.features(prompt, blocks) == kept).all(1).any()), "a feature row was not written"


def features_do_not_depend_on_place_or_turn(bench: StageBench) -> None:
    prompt = bench.prompts[1]
    needed = bench.image_blocks(prompt)
    places = [list(range(needed)), [40 - 3 * each for each in range(needed)]]
    found = []
    for blocks in places:
        bench.encode([prompt], [blocks])
        found.append(bench.features(prompt, blocks))
    assert torch.allclose(found[0], found[1], atol=CLOSE), "the same image in other blocks has other features"


def features_do_not_depend_on_the_batch(bench: StageBench) -> None:
    prompts = bench.prompts[1:]
    places = [range(20 * each, 20 * each + bench.image_blocks(prompt)) for each, prompt in enumerate(prompts)]
    alone = []
    for prompt, blocks in zip(prompts, places, strict=True):
        bench.encode([prompt], [list(blocks)])
        alone.append(bench.features(prompt, list(blocks)))
    bench.memory[IMAGE].tensor.fill_(0.5)
    bench.encode(prompts, [list(blocks) for blocks in places])
    for prompt, blocks, wanted in zip(prompts, places, alone, strict=True):
        assert torch.allclose(bench.features(prompt, list(blocks)), wanted, atol=CLOSE), "a batch changes the features"


# ---------------------------------------------------------------- P


def a_prompt_writes_its_own_blocks(bench: StageBench) -> None:
    work, before = bench.prompts[0].work, bench.memory[KV].tensor.clone()
    bench.prefill(work, bench.table(work))
    assert bench.is_untouched(KV, bench.table(work), before), "KV blocks of others were written"


def chunks_are_as_good_as_the_whole_prompt(bench: StageBench) -> None:
    for prompt in bench.prompts:
        work = prompt.work
        whole = bench.prefill(work, bench.table(work)), bench.keys(work, bench.table(work))
        bench.stage.close(work.request)
        chunked = bench.prefill(work, bench.table(work, 1), 3, 4), bench.keys(work, bench.table(work, 1))
        bench.stage.close(work.request)
        assert whole[0] == chunked[0], f"the first token is {whole[0]}, and {chunked[0]} in chunks"
        assert torch.allclose(whole[1], chunked[1], atol=CLOSE), "chunks write other keys and values"


def prompts_of_one_step_do_not_mix(bench: StageBench) -> None:
    works = [prompt.work for prompt in bench.prompts[:2]]
    alone = []
    for work in works:
        alone.append(bench.prefill(work, bench.table(work)))
        bench.stage.close(work.request)
    for place, work in enumerate(works):
        bench.open(work, bench.table(work, place))
    found = bench.forward(prefills=tuple(Prefill(work.request, 0, len(work.prompt), True) for work in works))
    together = [found[work.request].token for work in works]
    assert together == alone, f"first tokens are {alone} alone, and {together} in one step"


def a_step_may_run_again(bench: StageBench) -> None:
    work = bench.prompts[0].work
    bench.open(work, bench.table(work))
    row = Prefill(work.request, 0, len(work.prompt), True)
    found = [bench.forward(prefills=(row,))[work.request].token]
    bench.stage.close(work.request)
    bench.open(work, bench.table(work))
    found.append(bench.forward(prefills=(row,))[work.request].token)
    assert len(set(found)) == 1, f"after close and open the same request samples {found}"


def a_request_that_is_not_open_fails_alone(bench: StageBench) -> None:
    work = bench.prompts[0].work
    wanted = bench.prefill(work, bench.table(work))
    bench.stage.close(work.request)
    bench.open(work, bench.table(work))
    rows = (Prefill("nobody", 0, 4, False), Prefill(work.request, 0, len(work.prompt), True))
    try:
        bench.forward(prefills=rows)
    except StageError:
        assert bench.forward(prefills=rows[1:])[work.request].token == wanted, "its neighbour's row cannot run again"
        return
    raise AssertionError("a row of a request that is not open must raise StageError")


# ---------------------------------------------------------------- D


def _decode_alone(bench: StageBench, work: Work) -> list[int]:
    tokens = [bench.start(work, bench.table(work))]
    while len(tokens) < work.max_tokens:
        tokens += bench.decode(work.request)
    bench.stage.close(work.request)
    return tokens


def decodes_go_on_where_they_were(bench: StageBench) -> None:
    """Check that a request that is opened with its outputs, in other blocks, decodes the same."""
    work = bench.prompts[0].work
    wanted = _decode_alone(bench, work)
    first = bench.start(work, bench.table(work))
    bench.stage.close(work.request)
    kv = bench.memory[KV].tensor
    kv[[each + 1 for each in bench.table(work)]] = kv[bench.table(work)]
    bench.open(work, bench.table(work, 1), tokens=[first])
    tokens = [first]
    while len(tokens) < work.max_tokens:
        tokens += bench.decode(work.request)
    assert tokens == wanted, f"outputs are {wanted}, and {tokens} after a move"


def decodes_of_one_step_do_not_mix(bench: StageBench) -> None:
    works = [prompt.work for prompt in bench.prompts[:2] if not prompt.work.media or roles_of(bench.letters).prefills]
    alone = [_decode_alone(bench, work) for work in works]
    tokens = [[bench.start(work, bench.table(work, place))] for place, work in enumerate(works)]
    for _ in range(OUTPUTS - 1):
        for row, token in zip(tokens, bench.decode(*(work.request for work in works)), strict=True):
            row.append(token)
    assert tokens == alone, f"outputs are {alone} alone, and {tokens} in one step"


def decodes_write_their_own_blocks(bench: StageBench) -> None:
    work = bench.prompts[0].work
    bench.start(work, bench.table(work))
    before = bench.memory[KV].tensor.clone()
    bench.decode(work.request)
    assert bench.is_untouched(KV, bench.table(work), before), "KV blocks of others were written"


def blocks_may_come_as_it_decodes(bench: StageBench) -> None:
    if not isinstance(bench.stage, GrowableStage):
        return
    work = bench.prompts[0].work
    wanted, table = _decode_alone(bench, work), bench.table(work)
    held = blocks_for(len(work.prompt), bench.rows[KV])
    tokens = [bench.start(work, table[:held])]
    bench.stage.grow(Grow({work.request: tuple(table[held:])}))
    while len(tokens) < work.max_tokens:
        tokens += bench.decode(work.request)
    assert tokens == wanted, f"outputs are {wanted}, and {tokens} where blocks come later"


STAGE_CHECKS: dict[str, tuple[StageCheck, ...]] = {
    ENCODE.letter: (
        features_fill_their_own_blocks,
        features_do_not_depend_on_place_or_turn,
        features_do_not_depend_on_the_batch,
    ),
    PREFILL.letter: (
        a_prompt_writes_its_own_blocks,
        chunks_are_as_good_as_the_whole_prompt,
        prompts_of_one_step_do_not_mix,
        a_step_may_run_again,
        a_request_that_is_not_open_fails_alone,
    ),
    DECODE.letter: (
        decodes_go_on_where_they_were,
        decodes_of_one_step_do_not_mix,
        decodes_write_their_own_blocks,
        blocks_may_come_as_it_decodes,
    ),
}
