"""Sphinx's settings. `make docs` (tools/build_site.py) copies this beside the pages, and builds from there.

Nothing in the pages is loaded from elsewhere, so that they read the same without a network.
"""

from __future__ import annotations

import inspect
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

sys.path.insert(0, os.environ["TRINITY_ROOT"])

import trinity
from tools import docstrings

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "trinity"
author = "the trinity authors"
release = version = trinity.__version__
html_title = f"trinity {version}"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]
templates_path: list[str] = []

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
html_last_updated_fmt = None

myst_heading_anchors = 4  # headings are linked to by the names that code hosts give them
nb_execution_mode = "force"  # outputs are of this tree, not of a cache
nb_execution_raise_on_error = True
nb_execution_timeout = 200  # seconds a cell
nb_output_stderr = "remove"  # progress bars
nb_merge_streams = True

autodoc_default_options = {"undoc-members": True, "member-order": "bysource"}
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
add_module_names = False
maximum_signature_line_length = 100
python_display_short_literal_types = True
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"


def _as_rst(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    errors = {name: f"trinity.errors.{name}" for name, each in vars(trinity.errors).items() if isinstance(each, type)}
    lines[:] = docstrings.restructured(lines, errors | docstrings.public_names(Path(app.srcdir) / "reference"))


def _without_silent(app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    silent = callable(value) and not isinstance(value, type) and not value.__doc__
    return True if silent else None


def _with_plain_types(app: Sphinx, value: Any, bound: bool) -> None:
    """Leave out of a signature what checks its arguments: patterns and bounds, which the text tells in words."""
    function = inspect.unwrap(value)
    with suppress(AttributeError, NameError, TypeError):
        function.__annotations__.update(get_type_hints(function))  # in place: what wraps it has the same


def setup(app: Sphinx) -> None:
    app.connect("autodoc-before-process-signature", _with_plain_types)
    app.connect("autodoc-process-docstring", _as_rst)
    app.connect("autodoc-skip-member", _without_silent)
