"""Verdicts of the proof of a multimodal checkpoint that nobody listed: kept in the cache folder, asked for at load.

The proof itself (``trinity.stages.proof``) needs the whole model, and a front end or an E has only a part. So whoever
needs a verdict first has the proof run in a process of its own; all others of this user and host read what it found. A
verdict is that of these files and of these versions of the libraries. A proof that was not run, or did not end, is no
verdict.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import msgspec

from trinity.errors import UnsupportedModel
from trinity.errors.cache_files import cache_folder, read_cached, write_cached
from trinity.preprocess.checkpoint.libraries import library_version

PROOF_MODULE = "trinity.stages.proof"
MOST_SECONDS = 3600.0  # of one proof
MOST_VERDICTS = 256  # files that the folder keeps
NOT_LOADED = 14  # exit code of a proof whose checkpoint cannot be loaded: its last line says why
_MOST_SAID = 600  # characters of what a failed process said
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_FORM = 5  # raised where a fact comes to mean something else
MEDIA = -1  # stands for all placeholders, among token ids
_LIBRARIES = ("transformers", "torch", "tokenizers", "pillow", "torchaudio", "mistral-common", "trinity-epd")


class MediaFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that a generic adapter needs beyond a checkpoint's config: found by trying, confirmed by the proof.

    - ``language`` ("language_model"): name of the text model within the model's base.
      "": the base is the text model, and ``towers`` are those of its children that are not.
    - ``image_token_id``, ``image_token``: placeholder of images, as an id and as text; -1 and "" where none serve.
    - ``image_marker`` (""): the placeholder with the tokens that must stand around it; "" where none must.
    - ``audio_token_id``, ``audio_token``: placeholder of clips, likewise.
    - ``clip_tokens`` (1): the fewest tokens of a clip that the model takes.
    - ``beside`` (""): input of an image that the model looks for as it encodes a clip, of which something else comes
      where a prompt has it (Phi-4-multimodal).
    - ``whole_media`` (False): tokens of one image see each other in both directions; with ``whole_windows`` (False) in
      layers with a window alone, with ``whole_prompt`` (False) as all tokens of a prompt with an image do (prefix LM).
    - ``together`` (none): ids of tokens that all see each other in both directions, those of several images in a prompt
      and those around placeholders (Molmo 2).
    - ``joined`` (False): items of equal shapes may be encoded as one batch.
    - ``features`` ("getter"): what makes features: ``get_image_features``, or the model's own "forward".
    - ``added`` (False): features are added to the placeholder's embedding, in place of taking its place.
    - ``embeds_codes`` (False): an encoder makes codes, and embeds them by the text model's embedding.
    - ``head`` ("config"): whose factors the output head applies: those of the "config", of its "text" part, or "none";
      "forward": logits are made by the model's own forward.
    - ``first`` (0): position of the first token.
    - ``axes`` (0): axes of rotary positions that the text model is given, where its config does not say more.
    - ``layers`` (none): layers of the text model to which an image adds a part of features each, and
      ``layer_names``: its keywords for where the rows are, and for the parts by layer (Granite Vision 4).
    - ``token_types`` ({}): by keyword of the text model that tells it the type of each token of a prompt, the types
      that are not 0, by token id, that of media under ``MEDIA`` (ERNIE 4.5 VL, whose experts go by them).
    - ``skipped`` (-1): id of a padding token that has no place: positions of a prompt are counted without it, from
      behind this number, which is its own position (fairseq's; Kosmos-2).
    - ``text_writes`` (False): its ``generate()`` runs that of its text model, which has the defaults of the text config
      and knows no generation_config.json (BLIP-2).
    - ``refused`` ({}): kinds of prompt that are not proven ("text", "image", "audio"), each with what differed.
    - ``single`` (False): what an image becomes depends on those beside it, so that a prompt has one (Emu3).
    - ``in_front`` (False): its processor writes an image's tokens into a prompt that has none, so that ids, and what an
      encoder is given, come of one call for image and text together, and a prompt has one image (BLIP-2).
    """

    language: str = "language_model"
    towers: tuple[str, ...] = ()
    image_token_id: int = -1
    image_token: str = ""
    image_marker: str = ""
    audio_token_id: int = -1
    audio_token: str = ""
    clip_tokens: int = 1
    beside: str = ""
    whole_media: bool = False
    whole_windows: bool = False
    whole_prompt: bool = False
    together: tuple[int, ...] = ()
    text_writes: bool = False
    refused: dict[str, str] = {}
    single: bool = False
    in_front: bool = False
    joined: bool = False
    features: str = "getter"
    added: bool = False
    embeds_codes: bool = False
    head: str = "config"
    first: int = 0
    axes: int = 0
    layers: tuple[int, ...] = ()
    layer_names: tuple[str, str] = ("", "")
    token_types: dict[str, dict[int, int]] = {}
    skipped: int = -1

    @property
    def media_tokens(self) -> dict[str, int]:
        """Placeholder token id of each kind of media that serves."""
        found = {"image": self.image_token_id, "audio": self.audio_token_id}
        return {kind: number for kind, number in found.items() if number >= 0}

    @property
    def text_alone(self) -> bool:
        """Tell if a prompt without media is proven."""
        return "text" not in self.refused


class ProofPart(msgspec.Struct, frozen=True):
    """One part of a proof: what it compared, whether that agreed, and the figures in words.

    ``spared`` (False): where it does not, the model serves without: it is a kind of prompt among others.
    """

    name: str
    passed: bool
    said: str
    spared: bool = False

    @property
    def fault(self) -> str:
        """Words for what is wrong with a part that failed, behind its name."""
        return "cannot be followed" if self.name.startswith("model's own") else "differ from the model's own"


class ProofVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a proof.

    - ``model_type``: of the checkpoint. ``parts``: what was compared, in order; the first that failed ended it.
    - ``serves``: kinds of prompt that serve ("text", "image", "audio"); none if a part failed. Others that its
      processor takes are in ``facts.refused``.
    - ``facts``: for the adapter. ``load_s``, ``proof_s``: seconds to load the whole, and for the rest.
    """

    model_type: str
    parts: tuple[ProofPart, ...] = ()
    serves: tuple[str, ...] = ()
    facts: MediaFacts = MediaFacts()
    load_s: float = 0.0
    proof_s: float = 0.0

    @property
    def failed(self) -> ProofPart | None:
        """The part that differed."""
        return next((part for part in self.parts if not (part.passed or part.spared)), None)


_trial: ContextVar[tuple[Path, MediaFacts] | None] = ContextVar("trial", default=None)
_known: dict[str, ProofVerdict] = {}


@contextmanager
def on_trial(directory: Path, facts: MediaFacts) -> Iterator[None]:
    """Have this context load ``directory`` with these facts, which are to be proven."""
    token = _trial.set((directory.resolve(), facts))
    try:
        yield
    finally:
        _trial.reset(token)


def require_facts(directory: Path, model_type: str) -> MediaFacts:
    """Return the facts of a checkpoint that is proven, or has the proof run first.

    Raises ``UnsupportedModel`` with the part that differed, or with why no proof could be run.
    """
    tried = _trial.get()
    if tried is not None and tried[0] == directory.resolve():
        return tried[1]
    verdict = find_verdict(directory) or _run_proof(directory, model_type)
    if verdict.failed is not None:
        raise UnsupportedModel(
            f"the multimodal {model_type!r} has no adapter, and its self-check found that the {verdict.failed.name} "
            f"{verdict.failed.fault}: {verdict.failed.said}. Run python -m trinity.check {directory} for all of it"
        )
    if not verdict.facts.media_tokens.keys() & set(verdict.serves):
        raise UnsupportedModel(f"the self-check of the multimodal {model_type!r} proved no media")
    return verdict.facts


def find_verdict(directory: Path) -> ProofVerdict | None:
    """Return the verdict of these very files, if there is one."""
    name = identify(directory)
    if name not in _known and (content := read_cached(_place(name))) is not None:
        try:
            _known[name] = msgspec.json.decode(content, type=ProofVerdict)
        except msgspec.MsgspecError:
            return None
    return _known.get(name)


def keep_verdict(directory: Path, verdict: ProofVerdict) -> None:
    """Keep a verdict for this process, and in the cache folder for others."""
    name = identify(directory)
    _known[name] = verdict
    write_cached(_place(name), msgspec.json.encode(verdict), MOST_VERDICTS)


def has_weights(directory: Path) -> bool:
    """Tell if there are files of weights at all."""
    return any(path.suffix in _WEIGHTS for path in directory.iterdir())


def identify(directory: Path) -> str:
    """Digest what a verdict is of: small files by content, weights by size and time, and the libraries' versions."""
    found = hashlib.sha256(repr([_FORM, *(library_version(name) for name in _LIBRARIES)]).encode())
    for path in sorted(each for each in directory.resolve().iterdir() if each.is_file()):
        stat = path.stat()
        found.update(f"{path.name} {stat.st_size} ".encode())
        small = path.suffix not in _WEIGHTS and stat.st_size < 1 << 26
        found.update(path.read_bytes() if small else str(stat.st_mtime_ns).encode())
    return found.hexdigest()[:32]


def _place(name: str) -> Path:
    return cache_folder() / "proofs" / f"{name}.json"


def _run_proof(directory: Path, model_type: str) -> ProofVerdict:
    """Run the proof in a process of its own: it holds the whole model, and ends with it."""
    command = [sys.executable, "-m", PROOF_MODULE, str(directory), str(os.getpid())]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    try:
        with _one_at_a_time(directory):
            if (found := find_verdict(directory)) is not None:
                return found
            ended = subprocess.run(command, capture_output=True, timeout=MOST_SECONDS, env=environment, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnsupportedModel(f"the self-check of the multimodal {model_type!r} could not be run: {error}") from error
    if ended.returncode == NOT_LOADED:
        raise UnsupportedModel(ended.stderr.decode("utf-8", "replace").rpartition("\n")[2])
    try:
        verdict = msgspec.json.decode(ended.stdout, type=ProofVerdict)
    except msgspec.MsgspecError:
        said = ended.stderr.decode("utf-8", "replace").strip()[-_MOST_SAID:]
        raise UnsupportedModel(
            f"the self-check of the multimodal {model_type!r} ended with code {ended.returncode} and no verdict; "
            f"run python -m trinity.check {directory} to see why: {said}"
        ) from None
    keep_verdict(directory, verdict)
    return verdict


@contextmanager
def _one_at_a_time(directory: Path) -> Iterator[None]:
    """Have the first that asks for a verdict run the proof, and others wait for it, where files can be locked."""
    try:
        import fcntl

        path = _place(identify(directory)).with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    except (ImportError, OSError):
        yield
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
