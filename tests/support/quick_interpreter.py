"""Triton's interpreter without the part that it does again and again: a fifth of what tests of kernels take.

It replaces the functions of ``triton.language`` for each launch, and once more for each call of a device function
within it, where they are replaced already.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any


def install() -> None:
    """Have it replace them only where they are not, if the interpreter has been imported. Twice does no harm."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or not hasattr(interpreter, "_LangPatchScope"):
        return  # nothing imported it, or a release that replaces them another way
    if getattr(interpreter._patch_lang, "quick", False):
        return
    language, replace = interpreter.tl, interpreter._patch_lang
    known: dict[int, list[ModuleType]] = {}

    def replace_once(function: Any) -> Any:
        names = function.__globals__
        if id(names) not in known:
            known[id(names)] = [each for each in names.values() if inspect.ismodule(each) and is_language(each)]
        if all(is_replaced(each) for each in known[id(names)]):
            return interpreter._LangPatchScope()
        return replace(function)

    def is_language(module: ModuleType) -> bool:
        return module in (language, language.core)

    def is_replaced(module: Any) -> bool:
        one_of_each = [module.load, module.tensor.__add__, *([module.math.exp] if module is language else [])]
        return not any(map(language.core.is_builtin, one_of_each))

    replace_once.quick = True  # type: ignore[attr-defined]
    interpreter._patch_lang = replace_once
