"""Structured output: grammars that an output keeps to, checked at the door and compiled for a tokenizer (llguidance).

A grammar travels as text. Each instance that draws tokens compiles it for itself, off its lane, and what the grammar
allows next is a function of that text and of the output's tokens: nothing else has to move with a request.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trinity.errors import describe_error, pip_install
from trinity.preprocess.checkpoint.tokenizer_files import load_tokenizer
from trinity.preprocess.text import grammar_check
from trinity.request import Structured

GRAMMAR_KINDS = {"json_schema": "the JSON schema", "regex": "the regex", "grammar": "the grammar"}
QUICK_S = 0.5  # of CPU time; a process starts in 0.1 s, and a schema of 1,000 properties takes another 0.2 s
CPU_S = 2.0  # that a grammar may take to compile and to be tried, at most
MEMORY_BYTES = 1 << 30  # of address space, stacks included, in the process that tries it
TRIAL_PATIENCE_S = 30.0  # for those seconds on a busy machine
COMPILE_NICENESS = 5  # of the thread that compiles one for serving, which gives way to steps
_MOST_BYTES = 128  # of a token, beyond what any but runs of spaces have
_MOST_GRAMMARS = 64  # that are kept compiled; answers of checks are kept for four times as many
_MOST_SAID = 200  # characters of an error of the compiler, which may repeat the grammar
_UNENDING = "NoExtensionBias"  # the compiler's word for a grammar whose outputs have no end


class GrammarProblem(ValueError):
    """Reason why a grammar cannot be served."""


class SlowGrammar(GrammarProblem):
    """The grammar took more CPU time than it was given."""


class NoTime(GrammarProblem):
    """This host had no time for the grammar just now."""


class GrammarAnswer(NamedTuple):
    """Fault of a grammar, "" for nothing; ``slow``: the time ended first."""

    problem: str
    slow: bool = False


def split_grammar(structured: str) -> tuple[str, str]:
    """Split the text of ``ResolvedSampling.structured`` into kind and grammar."""
    kind, _, text = structured.partition(":")
    return kind, text


def join_grammar(structured: Structured | None) -> str:
    """Return the text that travels, "" for none: the kind, which the compiler knows, and the grammar."""
    if structured is None:
        return ""
    if structured.json_object:
        return 'json_schema:{"type": "object"}'
    kind = next(kind for kind in GRAMMAR_KINDS if getattr(structured, kind) is not None)
    return f"{kind}:{getattr(structured, kind)}"


def check_installed() -> None:
    """Raise ``GrammarProblem`` if llguidance is missing."""
    if find_spec("llguidance") is None:
        raise GrammarProblem(f"structured output needs llguidance; {pip_install('structured')}")


@lru_cache(maxsize=4 * _MOST_GRAMMARS)
def try_grammar(structured: str, cpu_s: float) -> GrammarAnswer:
    """Try a grammar in a process that may be killed, within ``cpu_s`` seconds of its CPU time. Blocks.

    Raises ``NoTime`` if this host had no time for it.
    """
    niceness = 5 if cpu_s <= QUICK_S else 15  # those that take long give way, and all to those who serve
    command = [sys.executable, "-P", grammar_check.__file__, str(cpu_s), str(MEMORY_BYTES), str(niceness)]
    question = json.dumps(split_grammar(structured)).encode()
    try:
        done = subprocess.run(command, input=question, capture_output=True, timeout=TRIAL_PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        said = f"this host had not {cpu_s:g} s of CPU time for the grammar within {TRIAL_PATIENCE_S:g} s"
        raise NoTime(f"{said}; send the request again later") from None
    if done.returncode:
        text = f"it is too complex: compiling it took more than {cpu_s:g} s of CPU time, or the memory for it"
        return GrammarAnswer(text, slow=-done.returncode in grammar_check.TIME_SIGNALS)
    return GrammarAnswer(_explain(str(json.loads(done.stdout))))


def _explain(said: str) -> str:
    """Put what the compiler says in words, within ``_MOST_SAID`` characters."""
    if _UNENDING in said:
        return "it refers to itself and never ends, so no output fits it; give each reference a case that ends"
    return said.removesuffix("<non-verbose/>").strip()[:_MOST_SAID]


def load_fast_tokenizer(directory: Path) -> Any:
    """Load a checkpoint's tokenizer for llguidance. Raises ``GrammarProblem`` if it cannot be taken."""
    check_installed()
    try:
        from llguidance.hf import from_tokenizer

        tokenizer = load_tokenizer(directory)
        tokenizer("")  # drops padding and truncation that the file may ask for
        end = tokenizer.eos_token_id
        return from_tokenizer(tokenizer, eos_token=end if end is not None else max(tokenizer.get_vocab().values()))
    except Exception as error:
        why = describe_error(error, _MOST_SAID)
        raise GrammarProblem(
            f"the model's tokenizer cannot be followed by llguidance, which takes fast tokenizers of bytes ({why})"
        ) from error


class GrammarCompiler:
    """Compiles grammars for the tokenizer of one checkpoint, each once; ``compile`` may be called from any thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._tokenizer: Any = None
        self._made: OrderedDict[str, Future[Any]] = OrderedDict()

    def compile(self, structured: str) -> Future[Any]:
        """Compile the text of ``ResolvedSampling.structured``; its result is an ``LLMatcher``, to be copied.

        The result raises ``GrammarProblem`` if it cannot be served.
        """
        with self._lock:
            found = self._made.get(structured)
            if found is not None:
                self._made.move_to_end(structured)
                return found
            found = self._made[structured] = Future()
            if len(self._made) > _MOST_GRAMMARS:
                self._made.popitem(last=False)
        grammar_check.with_deep_stack(lambda: self._fill(found, structured), "trinity-grammar")
        return found

    @property
    def tokenizer(self) -> Any:
        """The ``LLTokenizer``. Raises ``GrammarProblem`` if there is none."""
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = load_fast_tokenizer(self._directory)
            return self._tokenizer

    def select_ends(self, stop_ids: Collection[int]) -> list[int]:
        """Select the tokens that may end an output and are none of its text: special ones, else all that stop it."""
        tokenizer = self.tokenizer
        special = [each for each in stop_ids if each >= tokenizer.vocab_size or tokenizer.is_special_token(each)]
        return special or sorted(stop_ids)

    def _fill(self, found: Future[Any], structured: str) -> None:
        with suppress(OSError):  # of this thread alone, on Linux: the compiler holds no lock of the interpreter's
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILE_NICENESS)
        try:
            made = grammar_check.make_matcher(*split_grammar(structured), self.tokenizer)
            problem = made.get_error()
            if problem:
                raise GrammarProblem(_explain(problem))
            found.set_result(made)
        except BaseException as error:
            found.set_exception(error if isinstance(error, GrammarProblem) else GrammarProblem(describe_error(error)))


def compiler_of(directory: Path) -> GrammarCompiler:
    """Return the compiler of a checkpoint, which all its stages in this process share."""
    stamps = [_stamp(directory / name) for name in ("tokenizer.json", "tokenizer_config.json")]
    return _compiler_of(directory, tuple(stamps))


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=8)
def _compiler_of(directory: Path, stamps: tuple[tuple[int, int], ...]) -> GrammarCompiler:
    return GrammarCompiler(directory)


def check_grammar(structured: str, directory: Path, cpu_s: float | None = None) -> None:
    """Check that a grammar can be served with a checkpoint's tokenizer. Blocks.

    - ``cpu_s`` (s, ``CPU_S``): CPU time that it may take to be tried.

    Raises ``GrammarProblem`` if it cannot: ``SlowGrammar`` if that time was too short, ``NoTime`` on a busy host.
    """
    check_installed()
    kind, _ = split_grammar(structured)
    answer = try_grammar(structured, CPU_S if cpu_s is None else cpu_s)
    if answer.problem:
        error = SlowGrammar if answer.slow else GrammarProblem
        raise error(f"{GRAMMAR_KINDS[kind]} is refused: {answer.problem}")
    matcher = compiler_of(directory).compile(structured).result().deep_copy()
    allowed = any(matcher.compute_bitmask())
    problem = matcher.get_error()
    if problem or not allowed:
        raise GrammarProblem(
            f"{GRAMMAR_KINDS[kind]} is refused: {_explain(problem) or 'no token can begin such an output'}"
        )


def find_mask(matcher: Any, tokenizer: Any) -> tuple[np.ndarray, bool]:
    """Return a bit for each token that may follow, uint8 [tokens / 8], and True if a mistaken one was taken out.

    Where a grammar leaves one text alone, the mask has what the tokenizer makes of it and no other: a control token for
    the text by which that is written, which cannot follow. ``list_spellings`` has others.
    """
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8).copy()
    filled = np.flatnonzero(bits)
    value = int(bits[filled[0]]) if len(filled) == 1 else 0
    if value.bit_count() != 1:
        return bits, False
    only = 8 * int(filled[0]) + value.bit_length() - 1
    ends = matcher.is_accepting() and only in tokenizer.eos_tokens
    mistaken = not ends and matcher.validate_tokens([only]) != 1
    if mistaken:
        bits[filled[0]] = 0
    return bits, mistaken


def list_spellings(matcher: Any, tokenizer: Any) -> list[int]:
    """List the tokens that may follow where a grammar leaves one text alone, by which that may begin.

    The mask of such a place has the tokenizer's own spelling and no other: of "the" neither "t" nor "th".
    """
    text = matcher.compute_ff_bytes()[:_MOST_BYTES]
    spelled = (tokenizer.tokenize_bytes(text[:size]) for size in range(1, len(text) + 1))
    return [found[0] for found in spelled if len(found) == 1 and matcher.validate_tokens(found) == 1]


def check_begin(structured: str, directory: Path, banned: Collection[int]) -> None:
    """Raise ``GrammarProblem`` if none but ``banned`` tokens can begin an output of a grammar that was checked."""
    compiler = compiler_of(directory)
    matcher = compiler.compile(structured).result().deep_copy()
    bits = np.unpackbits(find_mask(matcher, compiler.tokenizer)[0], bitorder="little")
    begins = {*np.flatnonzero(bits).tolist(), *list_spellings(matcher, compiler.tokenizer)}
    if matcher.is_accepting() or not begins <= set(banned):
        return
    raise GrammarProblem(
        f"{GRAMMAR_KINDS[split_grammar(structured)[0]]} is refused: no token that can begin such an output may be "
        "drawn; take one of them out of suppress_tokens, begin_suppress_tokens or bad_words_ids, which the "
        "checkpoint's generation config may set too (an empty value in the request leaves them out), and ask for no "
        "text of an image's tokens, which some models never write"
    )


def list_unwritten(config: Any) -> frozenset[int]:
    """List the tokens that a model's own forward never lets it draw: those of an image's codes (Chameleon)."""
    named: dict[str, int] = getattr(config, "vocabulary_map", None) or {}
    return frozenset(number for text, number in named.items() if text.startswith("IMGIMG"))
