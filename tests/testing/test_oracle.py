"""The oracle: which class of transformers it loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from support.checkpoint_files import checkpoint
from trinity.request import Request
from trinity.testing.oracle import Oracle


def test_a_listed_type_needs_no_architectures_in_its_config(tmp_path: Path) -> None:
    folder = tmp_path / "llava"
    shutil.copytree(checkpoint("llava"), folder)
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    asked = Request("The sky is", max_tokens=4)
    assert Oracle(folder).answer(asked).token_ids == Oracle(checkpoint("llava")).answer(asked).token_ids
