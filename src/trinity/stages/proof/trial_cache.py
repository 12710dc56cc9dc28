"""Things that the trials of one proof share: request processors, processed prompts, encoded media, each made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from trinity.memory.block_memory import BlockMemory
from trinity.preprocess.checkpoint.verdicts import MediaFacts, on_trial
from trinity.preprocess.processor import ProcessedRequest, RequestProcessor
from trinity.preprocess.proof_requests import process_prompt
from trinity.stages.proof.prompts import ProofPrompt
from trinity.stages.proof.reference import PROOF_OUTPUTS, raw_text

_PLAIN = MediaFacts()
# Facts that a request processor does not read.
_NOT_PROCESSED = ("language", "towers", "features", "embeds_codes", "joined", "head", "first", "skipped")
_NOT_ENCODED = ("whole_media", "head", "first", "skipped")  # those that an encoder does not

EncodedMedia = tuple[BlockMemory | None, list[tuple[int, ...]]]
"""Memory of image blocks, and the blocks of each item."""


class TrialCache:
    """Keeps, for a checkpoint on trial, what trials with equal facts need: opening a processor takes as long as a load.

    ``templated``: it has a chat template.
    """

    def __init__(self, directory: Path, templated: bool) -> None:
        self._directory, self._templated = directory, templated
        self._processors: dict[bytes, RequestProcessor] = {}
        self._processed: dict[tuple[bytes, int], tuple[ProofPrompt, ProcessedRequest]] = {}
        self.encoded: dict[Any, EncodedMedia] = {}

    def open(self, facts: MediaFacts) -> RequestProcessor:
        """Open a request processor with these facts, or return the one that is open. Raises as its init does."""
        key = _key_without(facts, _NOT_PROCESSED)
        if key not in self._processors:
            with on_trial(self._directory, facts):
                self._processors[key] = RequestProcessor(self._directory, ignore_generation_config=True)
        return self._processors[key]

    def process(self, facts: MediaFacts, prompt: ProofPrompt) -> ProcessedRequest:
        """Make ids, spans and encoder inputs of a prompt, item by item."""
        key = _key_without(facts, _NOT_PROCESSED), id(prompt)
        if key not in self._processed:
            text = prompt.messages if self._templated else raw_text(prompt)
            made = process_prompt(self.open(facts), prompt.name, text, prompt.images, PROOF_OUTPUTS, prompt.clips)
            self._processed[key] = prompt, made  # the prompt stays, and so its id
        return self._processed[key][1]

    def key_of(self, facts: MediaFacts, made: ProcessedRequest) -> Any:
        """Return under which key of ``encoded`` the media of a request lie."""
        return _key_without(facts, _NOT_ENCODED), tuple((span.content, span.tokens) for span in made.work.media)

    def close(self) -> None:
        """End the processors' threads."""
        for each in self._processors.values():
            each.close()


def _key_without(facts: MediaFacts, names: tuple[str, ...]) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(facts, **{name: getattr(_PLAIN, name) for name in names}))
