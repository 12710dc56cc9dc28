"""Loads only the weights that a role needs, once per process however many instances share them."""

from __future__ import annotations

import hashlib
import logging
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from trinity.errors import ConfigError, UnsupportedModel
from trinity.memory.shared_regions import can_share, open_region
from trinity.memory.weight_digests import LoadedFiles, are_only_touched, identify_files, sample_digest
from trinity.memory.weight_shelf import Turn, take_turn
from trinity.preprocess.checkpoint.config_file import read_config
from trinity.preprocess.checkpoint.libraries import explain_library
from trinity.stage_kinds import all_letters, roles_of
from trinity.stages.attention.interface import PAGED_ATTENTION, register_attention
from trinity.stages.attention.kv_rows import KvRow
from trinity.stages.attention.latent import watch_expansions
from trinity.stages.attention.row_counts import answer_counts
from trinity.stages.kernels.admission import is_known
from trinity.stages.kernels.decoder_layers import drop_unused_layers, skip_unsampled_rows
from trinity.stages.kernels.known_sources import LayerPart
from trinity.stages.kernels.linear import is_packing_faster
from trinity.stages.kernels.native_linear import is_native_faster
from trinity.stages.kernels.part_kernels import use_kernels
from trinity.stages.models.base import ModelAdapter, find_head
from trinity.stages.models.checks import refuse_layers, self_check, set_attention
from trinity.stages.models.generic import GenericAdapter
from trinity.stages.models.indexers import watch_indexers
from trinity.stages.models.load_bar import LONG_LOAD_BYTES, quiet, shows_bar
from trinity.stages.models.loaded_model import LoadedModel
from trinity.stages.models.own_draws import own_draws
from trinity.stages.models.partial_models import find_model_class, make_partial_class
from trinity.stages.models.quantization import (
    align_dtypes,
    choose_fp8,
    convert_to_fp8,
    is_fp8,
    is_proven,
    prepare_quantized,
    read_quantization,
)
from trinity.stages.models.quantizers import (
    check_dtype,
    check_rows,
    count_quantised_bytes,
    find_quantised,
    finish_layers,
    prepare_method,
    stays_quantised,
)
from trinity.stages.models.registry import find_adapter, is_known_text
from trinity.stages.models.shared_parts import fill_part, move_part
from trinity.stages.models.state_probe import prepare_states
from trinity.stages.models.unneeded_weights import list_needed_by_encoder
from trinity.stages.models.whole_forward import check_first_token, survey_rows, survey_text

logger = logging.getLogger("trinity")
_CPU = torch.device("cpu")
_lock = threading.RLock()
_parts: WeakValueDictionary[Any, Any] = WeakValueDictionary()


def load_model(
    model_dir: str | Path,
    letters: str,
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    threads: int | None = None,
    packed: bool = False,
    shelf: str = "",
) -> LoadedModel:
    """Load the weights that an instance with the roles ``letters`` needs, and no others.

    - ``model_dir``: checkpoint in transformers' layout.
    - ``letters``: any of "E", "P" and "D".
    - ``dtype`` (None): None or "auto" is the checkpoint's own; CPU weights are then memory-mapped and shared by all
      processes of a host.
    - ``device`` ("cpu"): torch device.
    - ``threads`` (None): torch's threads for this process; None leaves them.
    - ``packed`` (False): give linear layers a packed copy of their weights, owned by this process, if decode steps on
      its CPU are then faster (prefill and encode gain less).
    - ``shelf`` (""): path of a ``WeightShelf``, by which processes share weights on a GPU, and converted ones on a CPU.

    FP8 weights stay so on a GPU that has FP8, and are widened elsewhere (``quantization``). Raises ``ConfigError`` if
    there is no such checkpoint or it lacks weights, ``UnsupportedModel`` if it cannot be served.
    """
    directory = Path(model_dir)
    if not letters or set(letters) - set(all_letters()):
        raise ConfigError(f"letters must be some of E, P and D, got {letters!r}")
    if threads is not None:
        torch.set_num_threads(threads)
    config = read_config(directory)
    files = identify_files(directory)
    adapter, known = find_adapter(config, directory)
    refuse_layers(adapter)
    if roles_of(letters).only_encodes and not adapter.multimodal:
        raise ConfigError(f"{directory} ({config.model_type}) is text only: a placement for it needs no E instance")
    kind, place = _pick_dtype(dtype, config), check_device(device)
    if place.type == "cuda" and kind == torch.float32:
        forbid_tf32()
    known = is_proven(read_quantization(directory), directory, place) and known
    names = _list_parts(letters, adapter)
    with _lock, own_draws():
        register_attention()
        fingerprint = _fingerprint(directory, kind)
        held = {name: _part(directory, name, kind, place, packed, files, shelf) for name in names}
        _check_unchanged(directory, files, _fingerprint(directory, kind) == fingerprint)
        model = LoadedModel(directory, letters, config, adapter, kind, place, fingerprint, **held, files=files)
        model = _survey(model)
        if not known and model.language is not None:
            check_once(model)
    return model


def check_once(model: LoadedModel) -> None:
    """Run the self-check of a model's text part, if nobody has. Raises ``UnsupportedModel`` if it does not agree."""
    if not getattr(model.language, "trinity_checked", False):
        self_check(model)
        model.language.trinity_checked = True


def _survey(model: LoadedModel) -> LoadedModel:
    """Find what the layers of a model that nobody listed attend with, and have a text model run whole.

    Raises ``UnsupportedModel`` if they cannot be served.
    """
    proven = isinstance(model.adapter, GenericAdapter)
    listed = type(model.adapter) is not ModelAdapter or is_known_text(model.adapter)  # somebody knows its parts
    if model.language is None or (proven and model.states is not None):
        return model
    if not proven and (model.multimodal or listed):
        _try_token(model)
        return model
    found: KvRow | None = getattr(model.language, "trinity_row", None)
    if found is None:
        try:
            found = (survey_text if proven else survey_rows)(model.language, model.adapter, model.device)
        except Exception as exc:
            raise UnsupportedModel(f"{model.config.model_type!r} cannot be served: {exc}") from exc
        model.language.trinity_row = found
    return replace(model, kv_row=found, whole=not proven)


def _try_token(model: LoadedModel) -> None:
    """Raise ``ConfigError`` if the text model does not run with its config: each request would fail."""
    if getattr(model.language, "trinity_runs", False):
        return
    large = model.weight_bytes >= LONG_LOAD_BYTES

    def make_empty() -> Any:
        part = _make_plain_part(model.directory, "language", torch.bfloat16)  # in which all operators have a meta form
        set_attention(part, model.adapter, PAGED_ATTENTION)
        return part

    check_first_token(model.language, model.adapter, model.device, make_empty if large else None)
    model.language.trinity_runs = True


def _check_unchanged(directory: Path, files: LoadedFiles, same: bool) -> None:
    """Raise ``ConfigError`` unless these files are there, or others of the same content by a look (``same``)."""
    now = identify_files(directory)
    if now != files and not (same and are_only_touched(files, now)):
        raise ConfigError(f"the files in {directory} were replaced while they were loaded; load them again")


def count_weight_bytes(
    model_dir: str | Path, letters: str, *, dtype: torch.dtype | str | None = None, device: torch.device | None = None
) -> int:
    """Count the bytes of the weights that ``load_model`` holds on a GPU for these roles, from the config alone.

    ``device`` (None): the GPU, which tells if weights stay in FP8. Raises ``ConfigError`` and ``UnsupportedModel`` as
    ``load_model`` does.
    """
    directory = Path(model_dir)
    config = read_config(directory)
    adapter, _ = find_adapter(config, directory)
    kind, fields = _pick_dtype(dtype, config), read_quantization(directory)
    keep = device is not None and choose_fp8(fields, directory, kind, device)
    register_attention()
    if fields is not None and stays_quantised(fields):
        outside = set[str]()
        if adapter.multimodal:
            part = _make_plain_part(directory, "vision", kind)
            outside = {name for name, _ in part.base_model.named_children()} - set(adapter.text_children(part))
        held = count_quantised_bytes(directory, outside, kind)
        return sum(held[name] for name in _list_parts(letters, adapter))
    parts = [_make_empty_part(directory, name, kind, keep) for name in _list_parts(letters, adapter)]
    return sum(tensor.nbytes for part in parts for tensor in (*part.parameters(), *part.buffers()))


def _list_parts(letters: str, adapter: ModelAdapter) -> list[str]:
    parts = roles_of(letters).parts
    return [each for each in ("vision", "language") if each in parts and (adapter.multimodal or each == "language")]


def _pick_dtype(dtype: torch.dtype | str | None, config: Any) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in (None, "auto"):
        named = getattr(torch, str(dtype).removeprefix("torch."), None)
        if not isinstance(named, torch.dtype):
            raise ConfigError(f"dtype {dtype!r} is not a torch dtype; give one such as 'bfloat16' or 'float32'")
        return named
    found = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32


def check_device(device: torch.device | str) -> torch.device:
    """Return a device with its number. Raises ``ConfigError`` for one that does not serve, or is not here."""
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {device!r} is none of torch's; give 'cpu' or 'cuda'") from error
    if place.type not in ("cpu", "cuda") or (place.type == "cpu" and place.index):
        raise ConfigError(f"device {device!r} does not serve; give 'cpu' or 'cuda'")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {device!r} is not here: torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", place.index or 0) if place.type == "cuda" else place


def forbid_tf32() -> None:
    """Have this process compute float32 in float32 on GPUs: cuDNN's convolutions round to 10 bits by default.

    The first setting is for all operators; torch asks for the other two to agree with it.
    """
    torch.backends.fp32_precision = "ieee"  # type: ignore[attr-defined]
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def _part(
    directory: Path,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    packed: bool,
    files: LoadedFiles,
    shelf: str = "",
) -> Any:
    """Return a part that this process has, or load it; what fails on the way is not kept."""
    key = (directory.resolve(), name, dtype, device, packed, files)
    part = _parts.get(key)
    if part is None:
        keep = choose_fp8(read_quantization(directory), directory, dtype, device)
        shared = shelf and _is_worth_sharing(directory, dtype, device, packed)
        made = _share_part(shelf, *key[:4], files, keep) if shared else _load_part(directory, name, dtype, keep, device)
        part = made.to(device).eval().requires_grad_(False)
        if name == "language":
            prepare_states(part, find_adapter(read_config(directory), directory)[0])
        quantised = getattr(part, "trinity_quantised", None)
        if quantised:  # its layers are the library's, whose weights no kernel here can read
            if name == "language":
                check_dtype(part, dtype)
            check_rows(quantised, find_head(part), dtype, device)
        else:
            use_kernels(part, on_gpu=name == "language" and device.type == "cuda", packed=packed)
        _parts[key] = part
    return part


def can_share_weights(directory: Path, device: object) -> bool:
    """Tell if processes share weights on a device; quantised ones they do not, whose modules depend on who loads."""
    return read_quantization(directory) is None and can_share(device)


def _is_worth_sharing(directory: Path, dtype: torch.dtype, device: torch.device, packed: bool) -> bool:
    """Tell if each process would hold these weights by itself; what is mapped from files is shared already."""
    if not can_share_weights(directory, device):
        return False
    packs = packed and not is_native_faster(dtype) and is_packing_faster(dtype)
    return device.type == "cuda" or (not packs and dtype != _pick_dtype(None, read_config(directory)))


def _share_part(
    shelf: str, directory: Path, name: str, dtype: torch.dtype, device: torch.device, files: LoadedFiles, keep_fp8: bool
) -> Any:
    """Take a part that another process has loaded, or load it and leave it to others; alone where neither works."""
    with take_turn(shelf, repr((str(directory), name, dtype, device, files, keep_fp8))) as turn:
        try:
            if turn.part is not None:
                return _take_part(turn, _make_empty_part(directory, name, dtype, keep_fp8), device)
            model = _load_part(directory, name, dtype, keep_fp8)
            region, table = move_part(model, device)
            if identify_files(directory) == files:
                turn.leave(region.size, table, region.file)
            return model
        except ConfigError:
            raise
        except Exception as error:  # of the system, a driver, torch, or a model that does not do without weights
            logger.warning(
                "the weights of the %s part are this process's alone: %s: %s", name, type(error).__name__, error
            )
    return _load_part(directory, name, dtype, keep_fp8)


def _take_part(turn: Turn, model: Any, device: torch.device) -> Any:
    assert turn.part is not None
    fill_part(model, open_region(device, turn.file, turn.part.size), turn.part.table)
    return model


def _make_empty_part(directory: Path, name: str, dtype: torch.dtype, keep_fp8: bool = False) -> Any:
    """Make the modules of a part without weights, on the meta device."""
    fields = read_quantization(directory)
    config = read_config(directory)
    adapter, _ = find_adapter(config, directory)
    with _lock, quiet(), torch.device("meta"):
        part = _build_part(config, adapter, name, dtype)
        if fields is not None and keep_fp8:
            convert_to_fp8(part, fields, directory)
    _fit_part(part, adapter, name)
    return part


def fingerprint_checkpoint(model_dir: str | Path, dtype: torch.dtype | str | None = None) -> str:
    """Return the fingerprint that ``load_model`` would give these files in this dtype. Raises ``ConfigError``."""
    directory = Path(model_dir)
    return _fingerprint(directory, _pick_dtype(dtype, read_config(directory)))


def _fingerprint(directory: Path, dtype: torch.dtype) -> str:
    return hashlib.sha256(f"{sample_digest(directory)} {dtype}".encode()).hexdigest()[:32]


def _load_part(
    directory: Path, name: str, dtype: torch.dtype, keep_fp8: bool = False, device: torch.device = _CPU
) -> Any:
    """Load a model of the checkpoint's class with the weights of one part and its own copy of the config.

    ``device``: where a quantizer other than FP8's is to put them; all else is loaded on the CPU.
    """
    config = read_config(directory)
    adapter, _ = find_adapter(config, directory)
    fields = read_quantization(directory)
    further, others = {}, fields is not None and not is_fp8(fields)
    if fields is not None and others:
        further = prepare_method(config, fields, device)
    elif fields is not None:
        prepare_quantized(config, fields, directory, keep_fp8)
    with nullcontext() if shows_bar(directory) else quiet():
        try:
            model, report = make_partial_class(
                find_model_class(config), adapter, name, directory, others
            ).from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                **further,
            )
        except (ConfigError, UnsupportedModel):
            raise
        except Exception as exc:  # of transformers, torch, safetensors and pickle, which share no class
            raise ConfigError(
                f"transformers cannot load the weights in {directory} ({type(exc).__name__}: {exc}); "
                f"{explain_library(exc) or 'is the checkpoint complete, and its config its own?'}"
            ) from exc
    lacking, other = sorted(report["missing_keys"]), sorted(str(key) for key in report["mismatched_keys"])
    if lacking and name == "vision" and fields is None and not other:
        lacking = list_needed_by_encoder(directory, model, adapter, lacking, dtype)
    if lacking := lacking + other:
        raise ConfigError(f"{directory} lacks weights of {type(model).__name__}, among them {', '.join(lacking[:5])}")
    if others:
        finish_layers(model)
        model.trinity_quantised = find_quantised(model, _make_plain_part(directory, name, dtype))
    elif fields is not None:
        align_dtypes(model, dtype)
    _fit_part(model, adapter, name)
    return model


def _make_plain_part(directory: Path, name: str, dtype: torch.dtype) -> Any:
    """Make the modules that a part would have if nothing were quantised, without weights."""
    config = read_config(directory)
    config.__dict__.pop("quantization_config", None)
    with quiet(), torch.device("meta"):
        return _build_part(config, find_adapter(config, directory)[0], name, dtype)


def _build_part(config: Any, adapter: ModelAdapter, name: str, dtype: torch.dtype) -> Any:
    """Make the modules of a part, without a look at files."""
    kind = make_partial_class(find_model_class(config), adapter, name)
    return kind._from_config(config, dtype=dtype)  # only transformers' Auto classes have a public from_config


def _fit_part(model: Any, adapter: ModelAdapter, name: str) -> None:
    """Have the part use paged attention, and leave out what no output depends on."""
    if name == "language":
        set_attention(model, adapter, PAGED_ATTENTION)
        watch_expansions(adapter.language(model))
        watch_indexers(adapter.language(model))
        model.trinity_counts = answer_counts(adapter.language(model))
        adapter.mark_layers(model)
        if is_known_text(adapter):
            skip_unsampled_rows(adapter.language(model), adapter.deepstack)
    elif adapter.vision_states is not None and is_known(LayerPart.IMAGE_FEATURES, type(model.base_model)):
        drop_unused_layers(model.base_model.vision_tower, adapter.vision_states)
