"""Generation config: what a request means that sets no sampling, and the check of what its sampling names.

Each field of transformers' ``GenerationConfig`` has its effect here, has none on the tokens of one sequence, or is
refused by name at load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from trinity.core.logits_processors import find_logits_processor
from trinity.core.values import ResolvedSampling
from trinity.errors import ClosedError, ConfigError, RequestError, describe_error, own_errors
from trinity.preprocess.text.grammar_trials import GrammarTrials
from trinity.preprocess.text.grammars import GrammarProblem, check_begin, check_installed, join_grammar, list_unwritten
from trinity.request import DEFAULT_MAX_TOKENS, PLAIN_GREEDY, Request, Sampling, check_sampling

FILE = "generation_config.json"
_OWN_NAMES = {
    "min_tokens": "min_new_tokens",
    "stop": "stop_strings",
}  # fields of Sampling that the file calls otherwise
_LENGTHS = ("max_new_tokens", "max_length", "min_length")
_OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # read where something is drawn, and only there
_LEAST_TOP_P = 1e-9  # leaves the most likely token, as 0 does in generate()
_LIST_OF_IDS = ("suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id", "stop_token_ids")
FOLLOWED = frozenset({*(_OWN_NAMES.get(name, name) for name in PLAIN_GREEDY), *_LENGTHS, "do_sample", "eos_token_id"})
"""Fields that have their effect."""
WITHOUT_EFFECT = frozenset(
    {
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_lookbehind",
        "bos_token_id",
        "cache_config",
        "compile_config",
        "continuous_batching_config",
        "decoder_start_token_id",
        "disable_compile",
        "early_stopping",
        "is_assistant",
        "length_penalty",
        "low_memory",
        "max_cache_len",
        "max_matching_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_scores",
        "pad_token_id",
        "prefill_chunk_size",
        "prompt_lookup_num_tokens",
        "renormalize_logits",
        "return_dict_in_generate",
        "speculation_type",
        "target_lookbehind",
        "transformers_version",
        "use_cache",
        "use_mtp",
    }
)
"""Fields that change no token of one sequence: outputs, compilation, caches, exact speculation, what beams read."""
REFUSED_UNLESS: dict[str, tuple[Any, ...]] = {
    "assistant_ensemble_weight": (),
    "cache_implementation": ("dynamic", "static", "offloaded", "offloaded_static", "hybrid", "sliding_window", "paged"),
    "constraints": ((), []),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ((), []),
    "forced_bos_token_id": (),
    "guidance_scale": (1,),
    "max_time": (),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "remove_invalid_values": (False,),
    "sequence_bias": ({}, []),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}
FindStopIds = Callable[[Sampling], tuple[Collection[int], Collection[int]]]

"""Fields that would change tokens, refused unless they have one of these values (or none), which turn them off."""


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults of a checkpoint, for requests that leave something open.

    - ``sampling``: every field of ``PLAIN_GREEDY`` is set.
    - ``max_new_tokens``, ``max_length`` (tokens, None): longest output, and longest prompt and output together.
    - ``min_length`` (tokens, 0): shortest prompt and output together.
    """

    sampling: Sampling = Sampling.greedy()
    max_new_tokens: int | None = None
    max_length: int | None = None
    min_length: int = 0

    def max_tokens(self, request: Request, prompt_tokens: int) -> int:
        """Return the longest output of a request. Raises ``RequestError`` if the checkpoint leaves it no token."""
        for limit in (request.max_tokens, self.max_new_tokens):
            if limit is not None:
                return limit
        if self.max_length is None:
            return DEFAULT_MAX_TOKENS
        if prompt_tokens >= self.max_length:
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens, and the checkpoint's {FILE} says max_length {self.max_length} "
                "for prompt and output; set max_tokens, or shorten the prompt",
                request.request_id,
            )
        return self.max_length - prompt_tokens

    def complete(self, sampling: Sampling, prompt_tokens: int) -> Sampling:
        """Set what a request's sampling leaves open."""
        own = {name: value for name in PLAIN_GREEDY if (value := getattr(sampling, name)) is not None}
        given = {name: getattr(self.sampling, name) for name in PLAIN_GREEDY}
        given["min_tokens"] = given["min_tokens"] or max(0, self.min_length - prompt_tokens)
        return msgspec.structs.replace(sampling, **{**given, **own})


def resolve_sampling(complete: Sampling, seed: int) -> ResolvedSampling:
    """Turn a sampling in which everything is set into what instances take; ``seed`` where it has none."""
    fields = {name: getattr(complete, name) for name in ResolvedSampling.__struct_fields__}
    fields["logit_bias"] = tuple((complete.logit_bias or {}).items())
    fields["structured"] = join_grammar(complete.structured)
    return ResolvedSampling(**{**fields, "seed": seed if complete.seed is None else complete.seed})


def load_generation_defaults(
    model_dir: Path, vocabulary: int | None = None, ignore: Collection[str] | bool = (), writer: Any = None
) -> GenerationDefaults:
    """Read ``generation_config.json``, or what ``config.json`` has of it where there is none, as transformers does.

    - ``vocabulary`` (tokens, None): token ids are below it.
    - ``ignore`` (()): fields that are not followed; True for all of them.
    - ``writer`` (None): config of a text model whose own ``generate()`` runs: it has its defaults, and reads no file.

    Raises ``ConfigError`` for a file that cannot be read, a value out of range, and a field that is not served.
    """
    named, file = _read_fields(model_dir, writer), FILE if writer is None else "config.json, of the text model"
    known = _known_fields()
    if not isinstance(ignore, bool):
        _check_ignored(ignore, known)
    fields = {name: value for name, value in named.items() if ignore is not True and name not in (ignore or ())}
    refused = sorted(name for name, value in fields.items() if name in known and _is_refused(name, value))
    if refused:
        shown = ", ".join(f"{name}={fields[name]!r:.40}" for name in refused)
        raise ConfigError(
            f"the generation config in {str(model_dir)!r} sets {shown}, which is not served here; remove it from "
            f"{file}, or serve without it: Pipeline(ignore_generation_config={refused!r})"
        )
    try:
        return _make_defaults(fields, vocabulary)
    except (RequestError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the generation config in {str(model_dir)!r} cannot be followed ({describe_error(error)}); mend "
            f"{file}, or name the field in Pipeline(ignore_generation_config=...)"
        ) from error


def check_token_ids(sampling: Sampling, vocabulary: int | None) -> None:
    """Raise ``ValueError`` if a list of token ids names one beyond the vocabulary: nothing could be meant by it."""
    lists = {name: getattr(sampling, name) or () for name in _LIST_OF_IDS}
    lists["logit_bias"] = tuple(sampling.logit_bias or ())
    lists["bad_words_ids"] = tuple(token for word in sampling.bad_words_ids or () for token in word)
    for name, ids in lists.items():
        if vocabulary is not None and ids and max(ids) >= vocabulary:
            raise ValueError(f"{name} has token {max(ids)}, and the vocabulary has {vocabulary} tokens")


def _read_fields(model_dir: Path, writer: Any) -> dict[str, Any]:
    """Read the fields that are set, with transformers' own reader."""
    from transformers import GenerationConfig

    old: dict[str, Any] = {"config_file_name": "config.json", "_from_model_config": True}
    source = {} if (model_dir / FILE).is_file() else old
    try:
        loaded: Any = (
            GenerationConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False, **source)
            if writer is None
            else GenerationConfig.from_model_config(writer)
        )
    except Exception as error:  # its readers and its validation raise anything
        raise ConfigError(
            f"{str(model_dir / FILE)!r} cannot be read ({describe_error(error)}); mend or remove it"
        ) from error
    return {name: value for name, value in vars(loaded).items() if value is not None and not name.startswith("_")}


def _known_fields() -> frozenset[str]:
    """List the fields that transformers' ``generate()`` knows; it ignores all others, and so is done here."""
    from transformers import GenerationConfig

    make: Any = GenerationConfig
    return frozenset(name for name in vars(make()) if not name.startswith("_"))


def _check_ignored(ignore: Collection[str], known: Collection[str]) -> None:
    listed = isinstance(ignore, Collection) and not isinstance(ignore, str)
    if not listed or not all(isinstance(name, str) for name in ignore):
        raise ConfigError(f"ignore_generation_config must be True or a list of fields, got {ignore!r:.80}")
    unknown = sorted(set(ignore) - set(known))
    if unknown:
        raise ConfigError(f"ignore_generation_config names {', '.join(unknown)}, which no generation config has")


def _is_refused(name: str, value: Any) -> bool:
    if name in FOLLOWED or name in WITHOUT_EFFECT:
        return False
    return not any(value == off for off in REFUSED_UNLESS.get(name, ()))


def _make_defaults(fields: dict[str, Any], vocabulary: int | None) -> GenerationDefaults:
    """Build the defaults. Raises ``RequestError``, ``TypeError`` or ``ValueError`` for a value out of range."""
    given = {name: fields[file_name] for name in PLAIN_GREEDY if (file_name := _OWN_NAMES.get(name, name)) in fields}
    if fields.get("do_sample") is True:
        given["top_p"] = given.get("top_p", 1.0) or _LEAST_TOP_P
        given.setdefault("top_k", 50)  # as generate() has it
        if not given.setdefault("temperature", 1.0):
            raise ValueError("do_sample with temperature 0")
    else:  # generate() reads none of these; a request that samples takes those that mean something
        given = {name: value for name, value in given.items() if name not in _OF_SAMPLING or _can_be(name, value)}
        given["temperature"] = 0.0
    if isinstance(given.get("forced_eos_token_id"), int):
        given["forced_eos_token_id"] = [given["forced_eos_token_id"]]
    for name in ("suppress_tokens", "begin_suppress_tokens"):  # -1 and the like are no tokens, and suppress none
        if isinstance(given.get(name), list):
            given[name] = [each for each in given[name] if not (type(each) is int and each < 0)]
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    sampling = check_sampling(Sampling.greedy(**given))
    check_token_ids(sampling, vocabulary)
    lengths = {name: _whole(name, fields[name]) for name in _LENGTHS if name in fields}
    if "min_new_tokens" in fields:
        lengths.pop("min_length", None)  # the other goes before it
    return GenerationDefaults(sampling=sampling, **lengths)


def _can_be(name: str, value: Any) -> bool:
    try:
        check_sampling(Sampling(**{name: value}))
    except RequestError:
        return False
    return True


def _whole(name: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} must be a whole number, got {value!r:.40}")
    return value


class SamplingDoor:
    """Checks of one pipeline's requests, on threads of their own: a slow grammar delays others of its kind alone.

    - ``directory``, ``config`` (None): of the checkpoint.
    - ``registered`` (True): processors that this process registered count, since instances are threads of it.
    """

    registered = True

    def __init__(self, directory: Path, config: Any = None) -> None:
        self._closed, self._directory, self._unwritten = False, directory, list_unwritten(config)
        self._trials = GrammarTrials(directory)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trinity-sampling-door")  # starts with the first check

    async def admit(self, request: Request, find_stop_ids: FindStopIds, defaults: GenerationDefaults) -> Request:
        """Return a checked request whose sampling can serve; ``find_stop_ids`` lists tokens that end its output.

        ``defaults``: of the checkpoint, which may ban tokens where the request says nothing.

        Raises ``RequestError`` (``Overloaded`` where too many grammars are being tried, or the host is too busy), or
        ``ClosedError`` after ``close()``.
        """
        sampling = request.sampling
        if sampling.logits_processor is None and sampling.structured is None:
            return request
        if self._closed:
            raise ClosedError("the request processor is closed")
        try:
            with own_errors(request.request_id, "checking the sampling", (GrammarProblem, asyncio.CancelledError)):
                if sampling.logits_processor is not None:
                    loop = asyncio.get_running_loop()
                    await loop.run_in_executor(self._pool, self._find_processor, sampling.logits_processor)
                if sampling.structured is not None:
                    check_ends(sampling, find_stop_ids)
                    await self._try(join_grammar(sampling.structured), request)
                    await self._check_begin(join_grammar(sampling.structured), defaults.complete(sampling, 0))
        except (ConfigError, GrammarProblem) as problem:
            raise RequestError(str(problem), request.request_id) from problem
        return request

    def _find_processor(self, name: str) -> None:
        if self._closed:
            raise ClosedError("the request processor was closed before it reached this request")
        find_logits_processor(name, registered=self.registered)

    async def _try(self, structured: str, request: Request) -> None:
        check_installed()
        problem = await self._trials.find_problem(structured, request.request_id, request.client)
        if problem:
            raise GrammarProblem(problem)

    async def _check_begin(self, structured: str, sampling: Sampling) -> None:
        words = {word[0] for word in sampling.bad_words_ids or () if len(word) == 1}
        banned = self._unwritten.union(words, sampling.suppress_tokens or (), sampling.begin_suppress_tokens or ())
        if banned:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._pool, check_begin, structured, self._directory, banned)

    def close(self) -> None:
        """Let running checks end, refuse those that wait, join the threads. Blocks."""
        self._closed = True
        self._trials.close()
        self._pool.shutdown(wait=True)


def check_ends(sampling: Sampling, find_stop_ids: FindStopIds) -> None:
    """Raise ``GrammarProblem`` where nothing may end an output of a form."""
    if not find_stop_ids(sampling)[0]:
        raise GrammarProblem(
            "structured output ends with an end-of-sequence token, and there is none here; "
            "leave ignore_eos out, or name one in stop_token_ids"
        )
