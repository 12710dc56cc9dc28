"""Pack what a machine with a GPU and torch may lack: make gpu-bundle ARGS="[--python 3.12] [--also NAME]"

Wheels in the versions of constraints.txt are unpacked into build/gpu-bundle/site. Triton's kernels are compiled into
build/gpu-bundle/triton, for GPUs of capability 9.0, by a Python with the machine's torch, Triton and transformers:
``--compiler PYTHON``, or an environment that is made once in build/gpu-compiler, of some 6 GB; ``--no-kernels`` packs
none. build/gpu-bundle/run.sh runs the probe, the tests and the benchmarks with both. Neither pip, a network nor a
compiler is needed where they run. Raises ``SystemExit`` where the bundle is larger than ``MOST_BYTES``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "gpu-bundle"
COMPILER = ROOT / "build" / "gpu-compiler"
THERE = ("torch==2.11.0", "triton==3.6.0", "transformers==5.17.0", "pillow")  # as machines with a GPU have them
MOST_BYTES = 30 << 20
# What trinity and its tests for GPUs import beside torch, transformers and triton; hypothesis is optional there.
NAMES = (
    *("anyio", "idna", "msgspec", "typing_extensions"),
    *("pytest", "iniconfig", "packaging", "pluggy", "pygments", "pytest-asyncio", "pytest-timeout"),
    *("hypothesis", "sortedcontainers"),
)
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 26, 24, 17)] + ["manylinux2014_x86_64"]
SCRIPT = """#!/bin/sh
# The probe, the tests or the benchmarks for a GPU, from a checkout on a machine with Python {python}, torch and triton:
#     sh build/gpu-bundle/run.sh probe | tests | bench [ARGUMENTS]
# Packed by `make gpu-bundle`; needs no network.
set -e
cd "$(dirname "$0")/../.."
PYTHON="${{PYTHON:-python3}}"
"$PYTHON" -c 'import sys; sys.version_info[:2] == ({numbers}) or sys.exit("packed for Python {python}: " + sys.version)'
export PYTHONPATH="$PWD/build/gpu-bundle/site:$PWD/src" PYTHONDONTWRITEBYTECODE=1
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
if [ -d build/gpu-bundle/triton ]; then
    export TRITON_CACHE_DIR="$PWD/build/gpu-bundle/triton"
    "$PYTHON" tools/gpu_bundle.py --place "$TRITON_CACHE_DIR"
fi
what="${{1:-probe}}"
[ $# -eq 0 ] || shift
case "$what" in
probe) exec "$PYTHON" benchmarks/gpu/probe.py "$@" ;;
tests) exec "$PYTHON" tools/gpu_tests.py "$@" ;;
bench) exec "$PYTHON" benchmarks/run.py --only gpu "$@" ;;
*) echo "probe, tests or bench, not $what" >&2; exit 2 ;;
esac
"""


def download(names: Sequence[str], python: str, folder: Path) -> None:
    """Download one wheel of each name for x86-64 Linux, no dependency of theirs. Raises ``CalledProcessError``."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    command += [word for each in PLATFORMS for word in ("--platform", each)]
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), "-d", str(folder), *names], check=True)


def unpack(wheels: Path, site: Path) -> None:
    """Unpack every wheel into ``site``, which is then a folder for PYTHONPATH."""
    site.mkdir(parents=True)
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)


def count_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def make_compiler(python: str, folder: Path = COMPILER) -> Path:
    """Make an environment with what the machine has, unless it is there; returns its Python.

    Raises ``SystemExit`` where this version of Python is not installed.
    """
    made = folder / "bin" / "python"
    if not (folder / ".made").exists():
        base = shutil.which(f"python{python}")
        if base is None:
            raise SystemExit(f"no python{python} is here to compile kernels with: give --compiler or --no-kernels")
        subprocess.run([base, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(made), "-m", "pip", "install", "--quiet", *THERE], check=True)
        (folder / ".made").touch()
    return made


def compile_kernels(python: Path, folder: Path, site: Path) -> None:
    """Compile the kernels of tools/gpu_kernels.py into ``folder`` with that Python, for which ``site`` has wheels.

    Raises ``CalledProcessError``.
    """
    setting = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    paths = os.pathsep.join(map(str, (site, ROOT / "src", ROOT)))
    setting |= {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as cache:
        setting["TRITON_CACHE_DIR"] = cache
        subprocess.run([str(python), str(ROOT / "tools" / "gpu_kernels.py"), str(folder)], env=setting, check=True)


def place(folder: Path) -> int:
    """Write for each carried kernel the file in which Triton looks up its parts; returns the number of kernels.

    Triton names them by absolute paths, so this is done where the kernels are used.
    """
    count = 0
    for metadata in folder.glob("*/*.json"):
        if not metadata.name.startswith("__grp__"):
            parts = (metadata, metadata.with_suffix(".cubin"))
            group = {"child_paths": {each.name: str(each.absolute()) for each in parts}}
            written = metadata.with_name(f"{os.getpid()}.tmp")
            written.write_text(json.dumps(group), encoding="utf-8")
            written.replace(metadata.with_name(f"__grp__{metadata.name}"))
            count += 1
    return count


def write_script(folder: Path, python: str) -> Path:
    """Write run.sh for this version of Python."""
    script = folder / "run.sh"
    script.write_text(SCRIPT.format(python=python, numbers=python.replace(".", ", ")), encoding="utf-8")
    return script


def pack(
    names: Sequence[str], python: str, folder: Path = FOLDER, most: int = MOST_BYTES, compiler: Path | None = None
) -> int:
    """Make the bundle anew; returns its bytes. ``compiler`` (None): a Python by which kernels are compiled."""
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    download(names, python, wheels)
    unpack(wheels, folder / "site")
    shutil.rmtree(wheels)
    write_script(folder, python)
    if compiler is not None:
        compile_kernels(compiler, folder / "triton", folder / "site")
    size = count_bytes(folder)
    if size > most:
        shutil.rmtree(folder)
        raise SystemExit(
            f"the bundle would have {size / 2**20:.1f} MiB, at most {most / 2**20:.0f}: carry fewer packages"
        )
    return size


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="version of the machine's Python")
    parser.add_argument(
        "--also", action="append", default=[], help="a further package, such as nixl-cu13; several times"
    )
    parser.add_argument(
        "--compiler", type=Path, help=f"a Python with {', '.join(THERE)}, by which kernels are compiled"
    )
    parser.add_argument("--no-kernels", action="store_true", help="the machine compiles them itself")
    parser.add_argument("--place", type=Path, metavar="FOLDER", help="make a Triton cache of carried kernels, and end")
    asked = parser.parse_args(arguments)
    if asked.place is not None:
        place(asked.place)
        return
    compiler = None if asked.no_kernels else asked.compiler or make_compiler(asked.python)
    size = pack([*NAMES, *asked.also], asked.python, compiler=compiler)
    print(f"{FOLDER.relative_to(ROOT)}: {size / 2**20:.1f} MiB of at most {MOST_BYTES / 2**20:.0f}")
    print(f"Carry the checkout and {FOLDER.relative_to(ROOT)}, which git ignores, to the machine, and run there:")
    for what in ("probe", "tests", "bench --minutes 8 --results bench-results"):
        print(f"    sh {FOLDER.relative_to(ROOT)}/run.sh {what}")


if __name__ == "__main__":
    main()
