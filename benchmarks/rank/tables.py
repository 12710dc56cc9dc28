"""The tables and aims of the benchmark of ranks, from the records of its cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from benchmarks.rank.ranking import MODELS, PAPER_RANKS, SETS, Judged, Setup, in_paper, judged, mean, rank
from benchmarks.report import Aim, Result, Table

Record = dict[str, Any]
STRATEGIES = ("paper", "race", "exhaustive")
REGRET_AIM, HELD_REGRET_AIM, RUNS_AIM = 0.01, 0.03, 30
_COLUMNS: tuple[tuple[str, Callable[[Judged], float], str], ...] = (
    ("rank, planning trace", lambda each: each.strict, ".2f"),
    ("within 2 %, planning trace", lambda each: each.band, ".2f"),
    ("rank, held out", lambda each: each.held_strict, ".2f"),
    ("within 2 %, held out", lambda each: each.held_band, ".2f"),
    ("regret, planning trace", lambda each: each.regret, ".2%"),
    ("regret, held out", lambda each: each.held_regret, ".2%"),
    ("replays until chosen", lambda each: each.runs, ".1f"),
)


def feasible(record: Record) -> bool:
    """Test whether any placement meets the SLO at any rate, on both traces."""
    return bool(max(record["plan"].values()) > 0 and max(record["held"].values()) > 0)


def of(record: Record, strategy: str) -> Judged:
    """``exhaustive``: the best on the planning trace, whose held-out figures nothing that sees only that can beat."""
    if strategy == "exhaustive":
        chosen, runs = max(record["plan"], key=lambda name: record["plan"][name]), record.get("exhaustive_runs", 0)
    else:
        chosen, runs = record["picks"][strategy]
    return judged(record["plan"], record["held"], chosen, runs)


def tabled(result: Result, records: Sequence[Record], cases: int, processes: int | None) -> None:
    """Fill a result. ``processes`` None: a quick run, whose aims are open."""
    result.values["cases"] = list(records)
    refused = [each for each in records if "error" in each]
    if refused:
        result.notes.append(f"{len(refused)} refused, such as {' / '.join(refused[0]['setup'])}: {refused[0]['error']}")
    records = [each for each in records if "error" not in each]
    met = [each for each in records if feasible(each)]
    result.notes += notes(records, met, cases, processes or 1)
    if not met:
        return
    found = {strategy: [of(each, strategy) for each in met] for strategy in STRATEGIES}
    result.tables += [strategies_table(found), beside_table_3(met), worst_table(met)]
    result.aims += aims(found["race"], open_=processes is None)


def notes(records: Sequence[Record], met: Sequence[Record], cases: int, processes: int) -> list[str]:
    """What ran of all, what it would take to run the rest, and which cases count for nothing."""
    seconds = mean([each["seconds"] for each in records])
    left = (cases - len(records)) * seconds / processes / 60
    said = [
        f"{len(records)} of {cases} cases ran, {seconds:.0f} s each on average. Their order is drawn with seed 0 "
        "before anything runs, and has pairs of model and dataset evenly; cases cut off when the time was over are "
        f"missing, so long ones are a little rarer. The rest takes about {left:.0f} minutes: run again to go on."
    ]
    if len(met) < len(records):
        said.append(f"In {len(records) - len(met)} cases no placement meets the SLO at any rate; they do not count.")
    return said


def strategies_table(found: dict[str, list[Judged]]) -> Table:
    rows = [[f"{strategy}, {what}", *cells] for strategy in STRATEGIES for what, cells in _rows(found[strategy])]
    return Table(
        f"Among all 43 placements at N = 8, {len(found['race'])} cases", ("", *(name for name, _, _ in _COLUMNS)), rows
    )


def _rows(cases: Sequence[Judged]) -> list[tuple[str, list[str]]]:
    columns = [([value(each) for each in cases], form) for _, value, form in _COLUMNS]
    return [
        ("mean", [format(mean(values), form) for values, form in columns]),
        ("worst", [format(max(values), form) for values, form in columns]),
    ]


def beside_table_3(records: Sequence[Record]) -> Table:
    """Mean rank of Algorithm 2's choice among the 35 placements of the paper's space, held out."""
    rows = []
    for dataset in SETS:
        cells = []
        for place, model in enumerate(MODELS):
            here = [each for each in records if Setup(*each["setup"])[:2] == (model, dataset)]
            ranks = [rank(in_paper(each["held"]), each["picks"]["paper"][0]) for each in here]
            ours = f"{mean(ranks):.2f} (worst {max(ranks)}, n {len(ranks)})" if ranks else "-"
            cells += [f"{PAPER_RANKS[dataset][place]:.2f}", ours]
        rows.append([dataset, *cells])
    header = [each for model in MODELS for each in (f"{model}, table 3", "ours")]
    return Table("Mean rank of Algorithm 2's choice among 35 placements, held out", ("", *header), rows)


def worst_table(records: Sequence[Record], most: int = 5) -> Table:
    """The cases in which the race lost most on the held-out trace."""
    ordered = sorted(records, key=lambda each: -of(each, "race").held_regret)[:most]
    rows = []
    for each in ordered:
        race, held = of(each, "race"), each["held"]
        best = max(held, key=lambda name: held[name])
        places = [each["picks"]["race"][0], each["picks"]["paper"][0], best]
        rows.append(
            [
                str(Setup(*each["setup"])),
                *(f"{name} {held[name]:.3g}" for name in places),
                f"{race.regret:.1%}",
                f"{race.held_regret:.1%}",
            ]
        )
    header = ("case", "race", "Algorithm 2", "best held out", "regret, planning trace", "regret, held out")
    return Table("Where the race lost most: placement and held-out goodput in requests/s", header, rows)


def aims(race: Sequence[Judged], open_: bool = False) -> list[Aim]:
    """A mean is judged, and the worst case stands beside it; of replays the worst case is judged."""

    def aim(what: str, wanted: str, values: Sequence[float], most: float, form: str) -> Aim:
        seen = f"mean {format(mean(values), form)}, worst {format(max(values), form)}"
        return Aim(f"race, {what}", wanted, seen, None if open_ else mean(values) <= most + 1e-9)

    runs = [each.runs for each in race]
    return [
        aim("mean rank within 2 %, planning trace", "1.00", [each.band for each in race], 1.0, ".2f"),
        aim("mean rank within 2 %, held out", "1.00", [each.held_band for each in race], 1.0, ".2f"),
        aim("regret, planning trace", "<= 1 %", [each.regret for each in race], REGRET_AIM, ".2%"),
        aim("regret, held out", "<= 3 %", [each.held_regret for each in race], HELD_REGRET_AIM, ".2%"),
        Aim(
            "race, replays in every case",
            f"<= {RUNS_AIM}",
            f"median {median(runs):.0f}, worst {max(runs)}",
            None if open_ else max(runs) <= RUNS_AIM,
        ),
    ]
