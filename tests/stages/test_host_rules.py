"""Rules of the host: masks are the grammar's, a function of the output alone, and a bad row harms no other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.checkpoint_files import checkpoint
from support.language_stage import PROMPT, Solo, work
from trinity.core.logits_processors import register_logits_processor
from trinity.core.messages import Prefill, ResolvedSampling, Sampled, Work
from trinity.errors import RequestError, StageError
from trinity.preprocess.text.grammars import compiler_of
from trinity.stages import host_rules
from trinity.stages.base import FailedSample
from trinity.stages.host_rules import GrammarState, HostRules, apply_host_rules

WORDS = ["yes", "no", "maybe", "maybe not", "7", "77", "ünsicher", "a boat", "a boat on the shore"]
PATTERN = "regex:" + "|".join(WORDS)
END = AutoTokenizer.from_pretrained(checkpoint("llama")).eos_token_id  # type: ignore[no-untyped-call]


def state(structured: str = PATTERN, ends: frozenset[int] = frozenset({END})) -> GrammarState:
    compiler = compiler_of(checkpoint("llama"))
    return GrammarState(compiler.compile(structured), compiler, ends)


def tokens_of(bits: np.ndarray) -> list[int]:
    return [at for at in range(8 * len(bits)) if bits[at // 8] >> at % 8 & 1]


@pytest.fixture(scope="module")
def pieces() -> list[bytes]:
    """The bytes of each token, by byte-level BPE's own table."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    table = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint("llama"))  # type: ignore[no-untyped-call]
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = set(tokenizer.all_special_ids)
    return [b"" if at in special else bytes(table[letter] for letter in name) for at, name in enumerate(names)]


@pytest.mark.parametrize("seed", range(8))
def test_masks_lead_to_the_words_of_a_language_and_to_nothing_else(seed: int, pieces: list[bytes]) -> None:
    words, draw, grammar = [word.encode() for word in WORDS], random.Random(seed), state()
    outputs: list[int] = []
    text = b""
    while True:
        bits, complete = grammar.find_allowed(outputs)
        allowed = tokens_of(bits)
        assert (END in allowed) == (text in words)
        assert complete == (allowed == [END])
        for token in set(allowed) - {END}:
            assert any(word.startswith(text + pieces[token]) for word in words), (text, pieces[token])
        token = draw.choice(allowed)
        if token == END:
            break
        outputs.append(token)
        text += pieces[token]
    assert text in words


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30))
def test_a_mask_follows_from_the_output_alone(choices: list[int]) -> None:
    """Along an output, back in it (a step was undone), into another one, or by a new state (another instance)."""
    held, outputs = state("regex:(a|b[cd]|[e-z ]{2,5};)*"), list[int]()
    for choice in choices:
        if choice > 36:
            outputs = outputs[: len(outputs) // 2]
        bits, complete = held.find_allowed(outputs)
        again, same = state("regex:(a|b[cd]|[e-z ]{2,5};)*").find_allowed(outputs)
        assert bits.tolist() == again.tolist()
        assert complete == same
        allowed = [token for token in tokens_of(bits) if token != END]
        outputs = [*outputs, allowed[choice % len(allowed)]]


def test_behind_its_end_an_output_only_ends() -> None:
    """A step may have been begun before its token was known to be the last."""
    bits, complete = state().find_allowed([END])
    assert (tokens_of(bits), complete) == ([END], True)


def test_an_output_that_is_none_of_the_language_fails() -> None:
    with pytest.raises(StageError, match="has left its grammar"):
        state().find_allowed([END - 1, 3, 4])


def test_a_mask_that_takes_too_long_refuses_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asked is told, and no stage is at fault; others get their tokens."""
    monkeypatch.setattr(host_rules, "SLOWEST_MASK_S", 0.0)
    with pytest.raises(RequestError, match=r"took more than .* ask for a simpler form") as refused:
        state().find_allowed([])
    assert type(refused.value) is RequestError
    found = served(Solo(), [structured_work("slow"), work("good")], 3)
    (wrong,) = found["slow"]
    assert isinstance(wrong, FailedSample)
    assert wrong.refused
    assert wrong.why == str(refused.value)
    assert ids(found["good"]) == Solo().serve(work("good"), 4)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_masks_ban_what_their_bits_lack(kind: torch.dtype) -> None:
    compiler = compiler_of(checkpoint("llama"))
    width = compiler.tokenizer.vocab_size + 9  # padding of the model's head
    logits = torch.randn(4, width).to(kind)
    before = logits.clone()
    rows = [(at, HostRules((1,), grammar=state()), list[int]()) for at in (0, 3)]
    found = apply_host_rules(logits, rows)
    allowed = tokens_of(state().find_allowed([])[0])
    for row in (0, 3):
        assert torch.isfinite(found.logits[row]).nonzero().flatten().tolist() == allowed
        assert torch.equal(found.logits[row, allowed], before[row, allowed])
    assert torch.equal(found.logits[1:3], before[1:3])
    assert (found.failed, found.complete) == ({}, set())


# ---------------------------------------------------------------- in a stage, beside other rows


def structured_work(name: str = "s", structured: str = PATTERN, **fields: Any) -> Work:
    sampling = ResolvedSampling(structured=structured, **fields)
    return Work(request=name, prompt=PROMPT, max_tokens=30, sampling=sampling, stop_ids=frozenset({END}))


def served(solo: Solo, works: list[Work], steps: int) -> dict[str, list[Sampled]]:
    """All in one batch, each until its end."""
    found: dict[str, list[Sampled]] = {}
    for each in works:
        solo.open(each)
        found[each.request] = [solo.step(Prefill(each.request, 0, len(each.prompt), True))[each.request]]
    for _ in range(steps):
        names = tuple(name for name, got in found.items() if got[-1].token not in (END, -1))
        for name, one in (solo.step(decodes=names) if names else {}).items():
            found[name].append(one)
    for each in works:
        solo.stage.close(each.request)
    return found


def ids(found: list[Sampled]) -> list[int]:
    return [one.token for one in found]


def greedy_by_hand(structured: str, steps: int) -> list[int]:
    """transformers' forward, llguidance's own matcher and mask, and numpy: nothing of this project."""
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(checkpoint("llama"), dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint("llama"))  # type: ignore[no-untyped-call]
    matcher = LLMatcher(from_tokenizer(tokenizer), LLMatcher.grammar_from_regex(structured.partition(":")[2]))
    text, outputs = list(PROMPT), list[int]()
    for _ in range(steps):
        with torch.inference_mode():
            scores = model(torch.tensor([text])).logits[0, -1].numpy().copy()
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        scores[: len(allowed)][allowed[: len(scores)] == 0] = -np.inf
        outputs.append(int(scores[: tokenizer.vocab_size + 64].argmax()))
        text.append(outputs[-1])
        if outputs[-1] == END:
            break
        assert matcher.consume_token(outputs[-1])
    return outputs


@pytest.mark.parametrize("structured", [PATTERN, "regex:[a-z ]{4,20}[.]"])
def test_greedy_tokens_are_those_of_the_models_logits_under_the_mask(structured: str) -> None:
    wanted = greedy_by_hand(structured, 25)
    assert ids(served(Solo(), [structured_work(structured=structured)], 24)["s"]) == wanted
    assert wanted[-1] == END


def test_other_rows_take_the_tokens_that_they_take_alone() -> None:
    others = [work("greedy"), work("drawn", temperature=1.0, seed=3), work("back", repetition_penalty=1.4)]
    mixed = [structured_work(), *others, structured_work("t", temperature=1.3, seed=4)]
    together = served(Solo(), mixed, 12)
    for each in mixed:
        alone = ids(served(Solo(), [each], 12)[each.request])
        assert ids(together[each.request]) == alone, each.request
    assert ids(together["t"])[-1] == END


def test_penalties_bans_and_seeds_apply_within_the_grammar() -> None:
    fields: dict[str, Any] = {"frequency_penalty": 1.0, "suppress_tokens": tuple(range(0, END, 2)), "top_k": 5}
    (found,) = served(
        Solo(), [structured_work(structured="regex:[a-z ]{8,16}", temperature=1.5, seed=9, **fields)], 25
    ).values()
    assert all(token % 2 for token in ids(found)[:-1])
    assert ids(found)[-1] == END
    assert len(found) > 4


def test_min_tokens_gives_way_where_only_the_end_is_left() -> None:
    (found,) = served(Solo(), [structured_work(structured="regex:no", min_tokens=20)], 25).values()
    assert ids(found)[-1] == END
    assert len(found) < 4


def test_forced_ends_do_not_cut_an_output_at_its_limit() -> None:
    asked = Work(
        request="s",
        prompt=PROMPT,
        max_tokens=2,
        sampling=ResolvedSampling(structured="regex:[a-z]{40}", forced_eos_token_id=(END,)),
        stop_ids=frozenset({END}),
    )
    assert END not in ids(served(Solo(), [asked], 1)["s"])


def nonsense(kind: str) -> Any:
    def processor(prompt: Any, outputs: Any, logits: torch.Tensor) -> Any:
        if len(outputs) < 2:
            return logits
        made = {
            "none": None,
            "shape": logits[:-1],
            "whole numbers": logits.long(),
            "nan": torch.full_like(logits, torch.nan),
            "infinity": torch.full_like(logits, torch.inf),
            "nothing left": torch.full_like(logits, -torch.inf),
        }
        if kind == "raises":
            raise ValueError("no idea")
        if kind == "exits":
            raise SystemExit(3)
        return made[kind]

    return processor


NONSENSE = ["none", "shape", "whole numbers", "nan", "infinity", "nothing left", "raises", "exits"]


@pytest.fixture
def hooks() -> Iterator[None]:
    seen: list[Any] = []

    def favour(prompt: Any, outputs: Any, logits: torch.Tensor) -> Any:
        seen.append((tuple(prompt), list(outputs)))
        outputs.append(1)  # its own list
        logits[100 + len(outputs)] = 1e4
        return logits

    register_logits_processor("favour", favour)
    for kind in NONSENSE:
        register_logits_processor(kind, nonsense(kind))
    yield
    for name in ("favour", *NONSENSE):
        register_logits_processor(name, None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize("kind", NONSENSE)
def test_a_processor_that_fails_fails_its_own_request_at_once(kind: str) -> None:
    solo, works = Solo(), [work("bad", logits_processor=kind), work("good")]
    found = served(solo, works, 4)
    wrong = found["bad"][-1]
    assert isinstance(wrong, FailedSample)
    assert kind in wrong.why
    assert len(found["bad"]) == 3
    assert ids(found["good"]) == Solo().serve(work("good"), 5)


def test_bans_amid_a_grammar_refuse_their_own_request() -> None:
    """All tokens that may follow "7" are banned; a request beside it says what it says alone."""
    load: Any = AutoTokenizer.from_pretrained(checkpoint("llama"))  # type: ignore[no-untyped-call]
    seven = load.convert_tokens_to_ids("7")
    banned = tuple(each for each in range(len(load)) if each != seven)
    asked = structured_work("s", "regex:7+x", suppress_tokens=banned)
    limited = structured_work("bad", "regex:7x", suppress_tokens=banned)
    found = served(Solo(), [limited, work("good"), asked], 4)
    first, wrong = found["bad"]
    assert first.token == seven
    assert isinstance(wrong, FailedSample)
    assert wrong.refused
    assert "suppress_tokens" in wrong.why
    assert "the regex allows" in wrong.why
    assert ids(found["good"]) == Solo().serve(work("good"), 5)
    assert ids(found["s"]) == [seven] * 5


@pytest.mark.usefixtures("hooks")
def test_a_processor_changes_its_row_by_prompt_and_output() -> None:
    found = served(Solo(), [work("a", logits_processor="favour"), work("b")], 3)
    assert ids(found["a"]) == [101, 102, 103, 104]
    assert ids(found["b"]) == Solo().serve(work("b"), 4)


@pytest.mark.usefixtures("hooks")
def test_what_a_processor_favours_stays_in_the_grammar() -> None:
    asked = structured_work(logits_processor="favour")
    assert ids(served(Solo(), [asked], 25)["s"])[-1] == END


def test_an_unknown_processor_fails_at_its_first_token() -> None:
    found = served(Solo(), [work("a", logits_processor="nobodys"), work("b")], 2)
    (wrong,) = found["a"]
    assert isinstance(wrong, FailedSample)
    assert "unknown logits processor 'nobodys'" in wrong.why
    assert not wrong.refused


def test_the_observer_sees_the_models_own_logits() -> None:
    plain, ruled = Solo(), Solo()
    served(plain, [work("s")], 0)
    served(ruled, [structured_work()], 0)
    assert torch.equal(plain.seen["s", 0], ruled.seen["s", 0])
