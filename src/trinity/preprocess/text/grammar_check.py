"""Program that compiles a grammar in a process that may be killed: ``grammar_check.py CPU_SECONDS BYTES NICENESS``.

Hostile grammars overflow a compiler's stack, or keep it busy for hours; here they end nobody else's process. It reads
JSON [kind, text] and prints JSON: "" if the grammar can serve, else why not. It imports nothing of trinity, to start
fast, and is imported for what both sides need.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

_starting = threading.Lock()  # the size of a stack is one setting of the whole process
STACK_BYTES = 256 << 20  # of a compiling thread: its recursion is as deep as rules refer to each other
TIME_SIGNALS = (signal.SIGPROF, signal.SIGXCPU)  # which end the process when its CPU time has
WALK = 48  # tokens that are drawn on trial
SPACES = r"( |\n {0,40}|\n\t{0,20})"  # between the parts of JSON: with any, an output may go on with spaces for ever
LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 50_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
"""llguidance's own limits: a mask of a tokenizer with 128,000 tokens stays below some tens of milliseconds."""


def make_matcher(kind: str, text: str, tokenizer: Any) -> Any:
    """Make an ``LLMatcher``, which holds an error in place of raising it; ``kind``: a field of ``Structured``."""
    from llguidance import LLMatcher, LLParserLimits

    make: dict[str, Callable[[str], str]] = {
        "json_schema": lambda schema: LLMatcher.grammar_from_json_schema(
            schema, defaults={"whitespace_pattern": SPACES}
        ),
        "regex": LLMatcher.grammar_from_regex,
        "grammar": LLMatcher.grammar_from_lark,
    }
    return LLMatcher(tokenizer, make[kind](text), log_level=0, limits=LLParserLimits(**LIMITS))


def with_deep_stack(work: Callable[[], None], name: str) -> threading.Thread:
    """Start ``work`` on a thread with room for deep recursion; only what it uses of its stack takes memory."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


def find_problem(kind: str, text: str) -> str:
    """Compile a grammar over bytes and draw some tokens of it; returns what is wrong, "" for nothing."""
    from llguidance import LLTokenizer

    try:
        matcher = make_matcher(kind, text, LLTokenizer("byte"))
    except ValueError as error:  # JSON that its reader refuses
        return str(error)
    for number in range(WALK):
        if matcher.get_error() or matcher.is_stopped():
            break
        mask = matcher.compute_bitmask()
        allowed = [at for at, byte in enumerate(mask) if byte]
        if not allowed:
            break
        at = allowed[number % len(allowed)]
        matcher.consume_token(8 * at + mask[at].bit_length() - 1)
    found: str = matcher.get_error()
    return found


def main(cpu_s: float, most_bytes: int, niceness: int) -> None:
    """Answer one question of the standard input within so much CPU time and memory."""
    import resource

    os.nice(niceness)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # a limit of the kernel has whole seconds
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s) + 1, int(cpu_s) + 2))
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kind, text = json.load(sys.stdin)
    found: list[str] = []
    with_deep_stack(lambda: found.append(find_problem(kind, text)), "grammar").join()
    print(json.dumps(found[0]))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
