"""TextStream: decodes output tokens to text one by one and cuts it at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trinity.preprocess.text.token_text import Tokenizer, make_text


class TextStream:
    """Decodes one request's output and releases text as soon as no later token can change it.

    - ``tokenizer``: tokenizer of the model.
    - ``stop`` (none): strings at which the text ends. The one that is complete first counts; of several complete at
      the same token, the longest.
    - ``prompt_ids`` (none): ids of the prompt; the last few are enough. The text is then what the output adds to the
      prompt's text, so that a space between the two is kept; where one changes the other, as bytes that are one
      invalid run, it is the output's own.

    All released text together equals ``tokenizer.decode(ids, skip_special_tokens=True)`` of all ids pushed, up to the
    stop string. Held back are what a later token may change (``TokenText``) and a possible beginning of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt_ids: Sequence[int] = ()) -> None:
        self._text = make_text(tokenizer, prompt_ids)
        self._stop = tuple(text for text in stop if text)
        self._longest = max(map(len, self._stop), default=1) - 1
        self._pending = ""
        self.stopped = False
        # Add a token. Returns the text to release now: "" if nothing is certain yet, or after a stop string.
        self.push: Callable[[int], str] = self._push if self._stop else self._text.push

    @property
    def has_stops(self) -> bool:
        """True where a token may end the text."""
        return bool(self._stop)

    @property
    def holds(self) -> bool:
        """True while text of the tokens that came is held back: the next one or the end releases it."""
        return self._text.holds or bool(self._pending)

    def _push(self, token_id: int) -> str:
        if self.stopped:
            return ""
        text = self._text.push(token_id)
        return self._release(text) if text else text

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Add tokens. Returns what the text of each adds up to; it is decoded once, unless there are stop strings."""
        return "".join(map(self.push, token_ids)) if self._stop else self._text.push_all(token_ids)

    def finish(self) -> str:
        """End the output. Returns the text that was held back, which may itself end at a stop string."""
        if self.stopped:
            return ""
        released = self._release(self._text.finish())
        rest, self._pending = self._pending, ""
        return released + rest

    def _release(self, text: str) -> str:
        self._pending += text
        ends = [(at + len(stop), at) for stop in self._stop if (at := self._pending.find(stop)) >= 0]
        if ends:
            self.stopped = True
            released, self._pending = self._pending[: min(ends)[1]], ""
            return released
        certain = len(self._pending) - self._stop_prefix()
        released, self._pending = self._pending[:certain], self._pending[certain:]
        return released

    def _stop_prefix(self) -> int:
        """Measure the longest suffix of the pending text that begins a stop string, in characters."""
        for length in range(min(self._longest, len(self._pending)), 0, -1):
            if any(stop.startswith(self._pending[-length:]) for stop in self._stop):
                return length
        return 0
