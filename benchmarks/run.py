"""Every benchmark, or one: make bench ARGS="[--only NAME] [--quick] [--patience S] [--minutes MINUTES] [--write-docs]"

Prints tables and writes bench-results/NAME.json; --write-docs puts that into docs/data and writes
docs/performance.md.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, below
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # of benchmarks with two threads, as instance processes have it

from benchmarks import performance_page, report
from benchmarks.setting import ROOT, ForeignLoad, Setting, facts

NAMES = {  # in the order of the page, each with its module
    "attention_kernels": "kernels.attention_kernels",
    "steps": "steps.steps",
    "step_overhead": "steps.step_overhead",
    "versus_generate_batch": "peers.versus_generate_batch",
    "memory": "memory.memory",
    "saturation": "steps.saturation",
    "stalls": "serving.stalls",
    "dual_stream": "serving.dual_stream",
    "ablation": "serving.ablation",
    "ttft_methods": "serving.ttft_methods",
    "encoders": "serving.encoders",
    "video": "serving.video",
    "audio": "serving.audio",
    "leading": "serving.leading",
    "siblings": "serving.siblings",
    "transports": "transfers.transports",
    "overlap": "transfers.overlap",
    "moves": "transfers.moves",
    "control": "transfers.control",
    "switches": "serving.switches",
    "fidelity": "fidelity.fidelity",
    "watch": "planning.watch",
    "redeploy": "planning.redeploy",
    "long_outputs": "planning.long_outputs",
    "rank": "rank.rank",
    "figures": "figures.figures",
    "plan_speed": "planning.plan_speed",
    "reservation": "serving.reservation",
    "scale": "scale.scale",
    "cpu_second": "peers.cpu_second",
    "served": "peers.served",
    "gpu": "gpu.gpu",
}
RESULTS = ROOT / "bench-results"
PAGE = ROOT / "docs/performance.md"
DATA = ROOT / "docs" / "data"


def run(name: str, setting: Setting, folder: Path = RESULTS) -> report.Result:
    """Run one benchmark, print its tables, write its JSON."""
    module = importlib.import_module(f"benchmarks.{NAMES[name]}")
    with ForeignLoad() as load:
        result: report.Result = module.run(setting)
    found = facts(load.share)
    print(result.text(), report.machine_line(found), "", sep="\n\n", flush=True)
    report.save(result, found, folder)
    return result


def write_page(folder: Path = RESULTS, page: Path = PAGE, data: Path = DATA) -> None:
    """Publish the results that are there among ``data``, and write the page of all data; it names what has none.

    Figures of benchmarks that did not run this time stay as they were. Raises ``FileNotFoundError`` where there is no
    JSON at all.
    """
    for name in NAMES:
        if (folder / f"{name}.json").exists():
            report.publish(*report.load(folder / f"{name}.json"), data)
    there = [name for name in NAMES if (data / f"{name}.json").exists()]
    if not there:
        raise FileNotFoundError(f"{folder} has no results: run benchmarks first")
    missing = [name for name in NAMES if name not in there]
    found = [report.load(data / f"{name}.json") for name in there]
    page.write_text(performance_page.page(found, missing), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=NAMES, action="append", help="one benchmark; may be given several times")
    parser.add_argument("--quick", action="store_true", help="tiny models, few repetitions: does it run at all?")
    parser.add_argument(
        "--write-docs", action="store_true", help="write docs/data and docs/performance.md from the results"
    )
    parser.add_argument("--patience", type=float, default=0.0, help="seconds a round may wait for a quiet machine")
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="that a benchmark of many cases may take (rank; served: 12 at least)"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    asked = parser.parse_args(arguments)
    if asked.quick and asked.write_docs:
        parser.error("figures of --quick mean nothing: run without it to write the documents")
    for name in asked.only or NAMES:
        kept = None if asked.quick else asked.results
        setting = Setting(quick=asked.quick, patience_s=asked.patience, minutes=asked.minutes, kept=kept)
        run(name, setting, asked.results)
    if asked.write_docs:
        write_page(asked.results)


if __name__ == "__main__":
    main()
