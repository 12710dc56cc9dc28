"""Command ``trinity check MODEL``: prove a checkpoint against its own ``generate()`` and say in words what serves.

A multimodal model is loaded whole, in float32 on the CPU, and this library's route is compared with the model's own:
prompt ids, features, positions, attention, logits and greedy tokens. Of a text model the logits through a paged cache
are. With ``--weights`` it prints or compares digests of the checkpoint's files instead.

example:
  trinity check path/to/model
  trinity check --weights path/to/model > digests
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from trinity.errors import ConfigError, TrinityError, UnsupportedModel, describe_error
from trinity.memory import weight_check
from trinity.preprocess.checkpoint.config_file import read_config
from trinity.preprocess.checkpoint.model_types import is_multimodal
from trinity.preprocess.checkpoint.verdicts import ProofPart, ProofVerdict
from trinity.preprocess.processor import RequestProcessor
from trinity.stage_kinds import LANGUAGE_STAGES
from trinity.stages.models.quantization import read_quantization

_WIDTH = 14
_PROMPTS = {"text": "without media", "image": "with images", "audio": "with clips of sound", "video": "with videos"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a model, or with ``--weights`` its files; 0 if it serves, 1 if not, 2 if the question is wrong."""
    parser = argparse.ArgumentParser(
        prog="trinity check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, help="a checkpoint's directory, to prove")
    parser.add_argument("--weights", type=Path, help="a checkpoint's directory, whose files are hashed instead")
    parser.add_argument("--digest", type=Path, help="with --weights: a file of digests to compare with")
    given = parser.parse_args(arguments)
    if given.weights is not None:
        digest = [] if given.digest is None else ["--digest", str(given.digest)]
        return weight_check.main(["--weights", str(given.weights), *digest])
    if given.model is None or given.digest is not None:
        parser.error("give a checkpoint's directory, or --weights and one")
    return print_verdict(given.model)


def print_verdict(directory: Path) -> int:
    """Prove a checkpoint and print the verdict; 0 if it serves, else 1. Raises ``ConfigError`` if it does not load."""
    config = read_config(directory)
    read_quantization(directory)  # what is not served is refused by its name
    try:
        verdict = _prove_media(directory) if is_multimodal(config) else _check_text(directory, str(config.model_type))
    except TrinityError:
        raise
    except Exception as error:  # transformers raises what it likes at files that are broken
        raise ConfigError(f"{str(directory)!r} cannot be loaded ({describe_error(error)}); is it complete?") from error
    for part in verdict.parts:
        print(f"{part.name:<{_WIDTH}} {_word(part):<8} {part.said}")
    print(f"loaded in {verdict.load_s:.1f} s, checked in {verdict.proof_s:.1f} s")
    if verdict.failed is None:
        print(f"{verdict.model_type} serves: {', '.join(verdict.serves)}")
        for kind, why in verdict.facts.refused.items():
            print(f"{verdict.model_type} rejects prompts {_PROMPTS[kind]}: {why}")
        return 0
    print(f"{verdict.model_type} is refused: its {verdict.failed.name} {verdict.failed.fault}")
    return 1


def _word(part: ProofPart) -> str:
    return "ok" if part.passed else "LEFT OUT" if part.spared else "DIFFERS"


def _prove_media(directory: Path) -> ProofVerdict:
    from trinity.stages.proof import prove

    return prove(directory)


def _check_text(directory: Path, model_type: str) -> ProofVerdict:
    """Run the self-check of a text model, which knows one part."""
    from trinity.stages.models import load_model
    from trinity.stages.models.loader import check_once

    said = "prefill in two chunks and a decode through a paged cache agree with its own forward, near and far"
    RequestProcessor(directory).close()  # its tokenizer and its defaults
    begun = loaded = time.monotonic()
    part = ProofPart("logits", True, said)
    try:
        model = load_model(directory, LANGUAGE_STAGES, dtype="float32")
        loaded = time.monotonic()
        check_once(model)  # a type that nobody listed was checked as it loaded
    except UnsupportedModel as error:
        part = ProofPart("logits", False, str(error))
    return ProofVerdict(
        model_type=model_type,
        parts=(part,),
        serves=("text",) * part.passed,
        load_s=loaded - begun,
        proof_s=time.monotonic() - loaded,
    )


if __name__ == "__main__":
    raise SystemExit(main())
