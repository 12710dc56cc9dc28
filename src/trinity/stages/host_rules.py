"""Host rules: what the host changes in rows of logits before their tokens are taken, by processors and by grammars.

Both need the tokens before on the host, so that such rows run at once, not behind unread steps. What they do follows
from the request and its text alone: a row that is preempted, moved or run again finds the same. The logits are
computed meanwhile where a device has been asked for them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity.core.logits_processors import LogitsProcessor, find_logits_processor
from trinity.core.messages import Work
from trinity.errors import ConfigError, RequestError, StageError, describe_error
from trinity.errors.arguments import show
from trinity.preprocess.text.grammars import (
    GRAMMAR_KINDS,
    GrammarCompiler,
    compiler_of,
    find_mask,
    list_spellings,
    split_grammar,
)
from trinity.stages.base import FailedSample
from trinity.stages.block_tables import upload

SLOWEST_MASK_S = 0.25  # of CPU time: a request whose grammar needs more has failed, since others wait for it
_BITS = 1 << np.arange(8, dtype=np.uint8)


class GrammarState:
    """Place of one request's output in its grammar.

    ``compiled``: an ``LLMatcher``, which is copied. ``ends``: tokens that end an output. ``banned``, ``first`` (()):
    those that the request bans in any case, and at its first output besides.
    """

    def __init__(
        self,
        compiled: Future[Any],
        compiler: GrammarCompiler,
        ends: Collection[int],
        banned: Collection[int] = (),
        first: Collection[int] = (),
    ) -> None:
        self._compiled, self._compiler, self._ends = compiled, compiler, ends
        self._banned, self._first = _pack_bits(banned), _pack_bits({*banned, *first})
        self._matcher: Any = None
        self._seen: list[int] = []

    def find_allowed(self, outputs: Sequence[int]) -> tuple[np.ndarray, bool]:
        """Return a bit for each token, uint8 [tokens / 8], that may follow ``outputs``; True if only its end may.

        Raises ``RequestError`` if no token may, or it is too costly to know, and ``StageError`` if these have left it.
        """
        began, ends = thread_time(), self._compiler.select_ends(self._ends)
        if outputs and outputs[-1] in ends:  # a step that was begun before this end was known
            return _set_bits(np.zeros(0, dtype=np.uint8), ends, True), True
        matcher = self._follow(list(outputs))
        allowed, mistaken = find_mask(matcher, self._compiler.tokenizer)
        _set_bits(allowed, self._compiler.tokenizer.eos_tokens, False)
        goes_on = mistaken or bool(allowed.any())
        if mistaken or (goes_on and self._bans_all(allowed, outputs)):  # the text may be spelled by other tokens
            allowed = _set_bits(allowed, list_spellings(matcher, self._compiler.tokenizer), True)
        problem = matcher.get_error()
        if not problem and thread_time() - began > SLOWEST_MASK_S:
            problem = f"the next tokens took more than {SLOWEST_MASK_S} s"
        if matcher.is_accepting():
            allowed = _set_bits(allowed, ends, True)
        if problem or not allowed.any():
            said = problem[:300] or "no token of this model is allowed"
            raise RequestError(f"the output cannot go on in its grammar ({said}); ask for a simpler form")
        return allowed, not goes_on

    def _bans_all(self, allowed: np.ndarray, outputs: Sequence[int]) -> bool:
        banned = self._banned if outputs else self._first
        size = min(len(banned), len(allowed))
        return size > 0 and not allowed[size:].any() and not (allowed[:size] & ~banned[:size]).any()

    def _follow(self, outputs: list[int]) -> Any:
        """Return the matcher behind these outputs, which mostly are one more than before."""
        seen = len(self._seen)
        if self._matcher is None or outputs[:seen] != self._seen:
            self._matcher, seen = self._compiled.result().deep_copy(), 0
        if not self._matcher.consume_tokens(outputs[seen:]):
            problem, self._matcher = self._matcher.get_error(), None
            raise StageError(f"the output has left its grammar ({problem[:300]})")
        self._seen = outputs
        return self._matcher


def _pack_bits(tokens: Collection[int]) -> np.ndarray:
    return _set_bits(np.zeros(0, dtype=np.uint8), tokens, True)


def _set_bits(bits: np.ndarray, tokens: Collection[int], value: bool) -> np.ndarray:
    """Set or clear the bits of tokens, in place, or in a longer copy."""
    if value and tokens and max(tokens) >= 8 * len(bits):
        bits = np.pad(bits, (0, max(tokens) // 8 + 1 - len(bits)))
    for token in tokens:
        if token < 8 * len(bits):
            bits[token // 8] = bits[token // 8] & ~_BITS[token % 8] | (_BITS[token % 8] if value else np.uint8(0))
    return bits


@dataclass(slots=True)
class HostRules:
    """Rules of one request.

    ``form``: what rules its output, such as "the regex". ``problem``: why rules cannot be followed; its first token
    says so.
    """

    prompt: tuple[int, ...]
    name: str = ""
    processor: LogitsProcessor | None = None
    grammar: GrammarState | None = None
    problem: str = ""
    form: str = ""

    def process(self, outputs: Sequence[int], logits: Tensor) -> Tensor:
        """Return what the processor makes of a copy of the row, float32 [vocabulary]. Raises ``StageError``."""
        assert self.processor is not None
        try:
            made = self.processor(self.prompt, outputs, logits.float().clone())
            found = torch.as_tensor(made).detach()
            if found.shape != logits.shape or not found.is_floating_point():
                raise TypeError(f"it must return floats {tuple(logits.shape)}, got {found.dtype} {tuple(found.shape)}")
            found = found.to(logits.device, torch.float32)
            if bool(found.isnan().any() | (found == torch.inf).any()) or not bool((found > -torch.inf).any()):
                raise ValueError("its logits hold NaN or infinity, or are all -inf")
        except BaseException as error:  # other people's code, which may call sys.exit()
            raise StageError(f"logits processor {show(self.name)} failed ({describe_error(error, 300)})") from error
        return found


def make_host_rules(work: Work, directory: Path) -> HostRules | None:
    """Make the rules of a request, and begin to compile its grammar; None if it has none."""
    sampling = work.sampling
    if not sampling.needs_host:
        return None
    rules = HostRules(work.prompt, sampling.logits_processor or "")
    try:
        if sampling.logits_processor is not None:
            rules.processor = find_logits_processor(sampling.logits_processor)
        if sampling.structured:
            compiler = compiler_of(directory)
            rules.form = GRAMMAR_KINDS[split_grammar(sampling.structured)[0]]
            words = {word[0] for word in sampling.bad_words_ids if len(word) == 1}
            banned, first = words.union(sampling.suppress_tokens), sampling.begin_suppress_tokens
            compiled = compiler.compile(sampling.structured)
            rules.grammar = GrammarState(compiled, compiler, work.stop_ids, banned, first)
    except ConfigError as error:
        rules.problem = str(error)
    return rules


@dataclass(slots=True)
class RuledRows:
    """Rows of logits after their rules.

    - ``logits``: of all rows. ``failed``: by its number, what stands for a row whose rules could not be followed.
    - ``complete``: numbers of rows that may only end.
    - ``forms``: what rules the outputs of rows that a grammar rules.
    """

    logits: Tensor
    failed: dict[int, FailedSample] = field(default_factory=dict)
    complete: set[int] = field(default_factory=set)
    forms: dict[int, str] = field(default_factory=dict)


def apply_host_rules(logits: Tensor, asked: Sequence[tuple[int, HostRules, list[int]]]) -> RuledRows:
    """Apply rules to rows of ``logits`` [n, vocabulary], in place but for processors of logits that are not float32.

    ``asked``: the number of each row that has some, these and its output so far. A processor comes first, so that no
    token that it favours leaves a grammar.
    """
    made = RuledRows(logits.float() if any(rules.processor for _, rules, _ in asked) else logits)
    masks: dict[int, np.ndarray] = {}
    for row, rules, outputs in asked:
        try:
            if rules.problem:
                raise StageError(rules.problem)
            if rules.grammar is not None:
                masks[row], ends = rules.grammar.find_allowed(outputs)
                made.complete |= {row} if ends else set()
                made.forms[row] = rules.form
            if rules.processor is not None:
                made.logits[row] = rules.process(outputs, made.logits[row])
        except Exception as error:
            masks.pop(row, None)
            said = str(error) if isinstance(error, RequestError) else describe_error(error, 300)
            made.failed[row] = FailedSample(-1, why=said, refused=type(error) is RequestError)
    if masks:
        _mask(made.logits, np.array(list(masks)), list(masks.values()))
    return made


def _mask(logits: Tensor, rows: np.ndarray, masks: Sequence[np.ndarray]) -> None:
    """Make -inf of all tokens of rows [k] but those whose bits are set."""
    width = logits.shape[1]
    count = -(-width // 8)
    bits = np.stack([np.pad(each[:count], (0, max(0, count - len(each)))) for each in masks])
    at, words = upload(rows, logits.device), upload(bits, logits.device)
    places = upload(_BITS, logits.device)
    banned = (words[:, :, None].bitwise_and(places) == 0).view(len(rows), -1)[:, :width]
    logits.index_copy_(0, at, logits.index_select(0, at).masked_fill_(banned, -torch.inf))
