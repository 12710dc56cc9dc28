"""Loads transformers' own video processors, with torchvision where it is installed and over torch alone elsewhere.

The modules of these classes import torchvision. Where it is missing they are executed once more as private twins: the
same source, whose imports of torchvision find ``torch_pixels``. No ``torchvision`` is put into ``sys.modules``, and
nobody else's transformers changes: for them it is not available, as before (decision 0101).
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.metadata
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from trinity.errors import UnsupportedModel

_TWINS = ("transformers.image_processing_backends", "transformers.models.auto.auto_mappings")
_PRIVATE = "trinity_twin_of."  # begins the names of twins, under which inspection finds their source
_VIDEO_FIELDS = (
    "merge_size",
    "patch_size",
    "temporal_patch_size",
    "slice_mode",
    "downsample_mode",
    "num_frames",
    "fps",
)


class NoVideo:
    """Video processor of a model whose videos are not supported; its sizes are those of ``images``."""

    model_input_names: tuple[str, ...] = ()

    def __init__(self, images: Any) -> None:
        for name in _VIDEO_FIELDS:
            setattr(self, name, getattr(images, name, None))


def backend_name() -> str:
    """Name what makes the pixels of videos, with its version: features of one backend are not those of another."""
    version = _torchvision_version()
    if version is not None:
        return f"torchvision {version}"
    import torch

    return f"torch {torch.__version__}"


def load_video_processor(model_dir: Path, config: Any) -> Any:
    """Load the video processor of a checkpoint; None if its files and transformers name none for this type.

    Raises ``UnsupportedModel`` for a class that transformers does not have, and what transformers raises on
    malformed files.
    """
    settings = _read_settings(model_dir)
    name = settings.get("video_processor_type") or _class_names().get(config.model_type)
    if name is None:
        return None
    return _find_class(str(name), config.model_type).from_dict(settings)


def _read_settings(model_dir: Path) -> dict[str, Any]:
    """Read the settings where transformers looks for them; {} if the checkpoint has none, so that defaults hold."""
    utils = _load("transformers.video_processing_utils")
    base = getattr(utils, "VideoProcessorMixin", None) or utils.BaseVideoProcessor  # transformers 5.17 has no mixin
    try:
        where = {"local_files_only": True}
        read, _ = base.get_video_processor_dict(str(model_dir), trust_remote_code=False, **where)
    except OSError:
        return {}
    settings = dict(read)
    if "video_processor_type" not in settings:  # those of an image processor, which transformers takes for videos too
        settings.pop("image_processor_type", None)
        settings.pop("processor_class", None)
    return settings


def _class_names() -> dict[str, str]:
    """Names of video processors by model type, as transformers has them where torchvision is installed."""
    mapping = _load("transformers.models.auto.video_processing_auto").VIDEO_PROCESSOR_MAPPING_NAMES
    # transformers 5.17 has names alone, later ones have one for each backend.
    named = {kind: each.get("torchvision") if isinstance(each, dict) else each for kind, each in mapping.items()}
    return {model_type: name for model_type, name in named.items() if isinstance(name, str)}


def find_images(name: str, backend: str) -> Any:
    """Find the class of an image processor in its own module, by its backend ("pil", or "torchvision" over torch).

    transformers' root hides some where torchvision is not installed. Raises ``ImportError``.
    """
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    names: Mapping[str, Any] = IMAGE_PROCESSOR_MAPPING_NAMES
    owners = [owner for owner, known in names.items() if (known or {}).get(backend) == name]
    if backend == "pil":
        found = _find_in_modules(name, owners, "image_processing_pil", importlib.import_module)
    else:
        found = _find_in_modules(name, owners, "image_processing", _load)
    if found is None:
        raise ImportError(f"transformers has no image processor {name}")
    return found


def _find_class(name: str, model_type: str) -> Any:
    owners = [owner for owner, known in _class_names().items() if known == name]
    found = _find_in_modules(name, owners, "video_processing", _load)
    if found is None:
        raise UnsupportedModel(
            f"the checkpoint of model type {model_type!r} names a video processor {name!r}, which this transformers "
            "does not have; install the version that the checkpoint names"
        )
    return found


def _find_in_modules(name: str, owners: Iterable[str], part: str, load: Callable[[str], Any]) -> Any:
    """Find a class in this part of the modules of these model types; None if none has it."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    for module in map(model_type_to_module_name, owners):
        path = f"transformers.models.{module}.{part}_{module}"
        if importlib.util.find_spec(path) is not None and hasattr(found := load(path), name):
            return getattr(found, name)
    return None


# ---------------------------------------------------------------- torchvision, or twins of modules without it


def _torchvision_version() -> str | None:
    from transformers.utils import is_torchvision_available

    return importlib.metadata.version("torchvision") if is_torchvision_available() else None


def _load(name: str) -> Any:
    """Import a module of transformers; where torchvision is missing, its twin."""
    return importlib.import_module(name) if _torchvision_version() is not None else _twins.load(name)


class _Overlaid:
    """A module with some names replaced, for ``from module import name`` of twins alone."""

    def __init__(self, module: ModuleType, names: Mapping[str, Any]) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Twins:
    """Private copies of transformers' modules, each executed once, in which torchvision is ``torch_pixels``."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}
        self._lock = threading.RLock()

    def load(self, name: str) -> Any:
        with self._lock:
            if name not in self._loaded:
                self._loaded[name] = self._execute(name)
            return self._loaded[name]

    def _execute(self, name: str) -> ModuleType:
        spec = importlib.util.find_spec(name)
        if spec is None or not isinstance(spec.loader, importlib.abc.InspectLoader):
            raise ModuleNotFoundError(f"no module {name}")
        code = spec.loader.get_code(name)
        assert code is not None
        module = importlib.util.module_from_spec(spec)
        module.__name__ = f"{_PRIVATE}{name}"
        sys.modules[module.__name__] = module
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._import}
        exec(code, module.__dict__)
        return module

    def _import(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        """Stand in for ``__import__`` in a twin."""
        if level == 0 and name.partition(".")[0] == "torchvision":
            return _stand_in(name if fromlist else "torchvision")
        whole = importlib.util.resolve_name("." * level + name, globals["__package__"]) if level else name
        if fromlist and _has_twin(whole):
            return self.load(whole)
        found = builtins.__import__(name, globals, locals, fromlist, level)
        overlay = _overlay(whole) if fromlist else None
        return found if overlay is None else _Overlaid(found, overlay)


_twins = _Twins()


def _has_twin(name: str) -> bool:
    """Tell if a module of transformers imports torchvision: those of processors, their base, the names of them."""
    last = name.rpartition(".")[2]
    of_model = name.startswith("transformers.models.") and not name.startswith("transformers.models.auto.")
    return name in _TWINS or last.startswith("video_processing_") or (of_model and last.startswith("image_processing_"))


def _stand_in(name: str) -> Any:
    """Return the module of this name that ``import torchvision...`` gives a twin."""
    from trinity.preprocess.checkpoint import torch_pixels

    transforms = SimpleNamespace(
        InterpolationMode=torch_pixels.InterpolationMode,
        v2=SimpleNamespace(functional=torch_pixels),
    )
    found: Any = SimpleNamespace(transforms=transforms)
    for part in name.split(".")[1:]:
        if not hasattr(found, part):
            raise ModuleNotFoundError(f"{name} needs torchvision itself: pip install torchvision", name=name)
        found = getattr(found, part)
    return found


def _overlay(module: str) -> dict[str, Any] | None:
    """Names that twins see otherwise: torchvision is available to them, in the version made for this torch."""
    if module == "transformers.image_utils":
        return _filters()
    if module in ("transformers.utils", "transformers.utils.import_utils"):
        return {
            "is_torchvision_available": lambda: True,
            "is_torchvision_v2_available": lambda: True,
            "is_torchvision_greater_or_equal": _matches_version,
            "logging": _Overlaid(importlib.import_module("transformers.utils.logging"), {"get_logger": _find_logger}),
        }
    return None


def _matches_version(least: str) -> bool:
    """Tell if torchvision for this torch is at least of this version: 0.28 is for torch 2.13, one each."""
    import torch
    from packaging import version

    release = version.parse(torch.__version__).release
    return version.parse(f"0.{release[1] + 15}.0") >= version.parse(least)


def _find_logger(name: str) -> Any:
    """Find the logger of the module that a twin is of, so that transformers' own settings hold for it."""
    from transformers.utils import logging

    return logging.get_logger(name.removeprefix(_PRIVATE))


def _filters() -> dict[str, Any]:
    from PIL.Image import Resampling

    from trinity.preprocess.checkpoint.torch_pixels import InterpolationMode

    known = InterpolationMode.__members__  # Pillow has more filters
    of_pil = {each: known[each.name] for each in Resampling if each.name in known}
    of_pil[Resampling.NEAREST] = InterpolationMode.NEAREST_EXACT
    back = {mode: each for each, mode in of_pil.items()}
    return {"pil_torch_interpolation_mapping": of_pil, "torch_pil_interpolation_mapping": back}
