"""Results as they lie in ``results/``: the newest of a benchmark on a machine, with the facts of the run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
#: What the names of a sweep's units begin with.
SWEEP = "sweep"
#: ``step-2xh200-2026-11-29.json``, and ``…-wan.json`` where a day's run was made in parts.
NAME = re.compile(r"(?P<benchmark>[a-z_]+)-(?P<hardware>\d+x[a-z0-9-]+?)-(?P<date>\d{4}-\d\d-\d\d)(-.*)?\.json")


@dataclass(frozen=True)
class Record:
    """One benchmark's rows.

    Attributes
    ----------
    benchmark, hardware : str
        Such as ``step`` and ``2xh200``.
    files : tuple of str
        Where they come from.
    facts : dict
        Machine, versions, commit and date, of the first file; and what a benchmark adds.
    rows : list of dict
        Of all files.
    """

    benchmark: str
    hardware: str
    files: tuple[str, ...]
    facts: dict[str, Any]
    rows: list[dict[str, Any]]

    def rows_by(self, *keys: str) -> dict[tuple[Any, ...], dict[str, Any]]:
        """Rows by what tells them apart; a later row takes the place of an earlier one."""
        return {tuple(row[key] for key in keys): row for row in self.rows}


def file_name(facts: Mapping[str, Any], part: str = "") -> str:
    """Name of a results file: benchmark, machine (and ranks, where they share GPUs), date, and part of a day's run."""
    hardware = f"{facts['gpus']}x{facts['gpu'].replace('NVIDIA ', '').replace(' ', '-').lower()}"
    if facts.get("ranks", facts["gpus"]) != facts["gpus"]:
        hardware += f"-{facts['ranks']}ranks"
    return f"{facts['benchmark']}-{hardware}-{facts['date'][:10]}{part}.json"


def take(outputs: Path, folder: Path = RESULTS) -> list[str]:
    """Copies what a session wrote (``step.json``, ``step-2.json``, …) to where results lie; returns the names."""
    names = []
    for path in sorted(outputs.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if "benchmark" in content:
            names.append(file_name(content, path.stem.removeprefix(content["benchmark"])))
            (folder / names[-1]).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    return names


def newest(benchmark: str, hardware: str, folder: Path = RESULTS, units: str = "") -> Record | None:
    """The rows of the last day on which a benchmark ran on a machine; None if it never did.

    Parameters
    ----------
    benchmark, hardware : str
        Such as ``step`` and ``2xh200``; ``2xh200@2026-11-29`` asks for a day of its own.
    folder : Path, optional
        Where the results are.
    units : str, optional
        Only days with a unit whose name begins so: not every run of the collectives has a sweep.
    """
    hardware, _, day = hardware.partition("@")
    days: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        found = NAME.fullmatch(path.name)
        if found and (found["benchmark"], found["hardware"]) == (benchmark, hardware):
            days.setdefault(found["date"], {})[path.name] = json.loads(path.read_text(encoding="utf-8"))
    fitting = [
        date
        for date, contents in days.items()
        if date == (day or date)
        and any(row.get("unit", "").startswith(units) for content in contents.values() for row in content["results"])
    ]
    if not fitting:
        return None
    contents = days[max(fitting)]
    first = next(iter(contents.values()))
    facts = {key: value for key, value in first.items() if key != "results"}
    rows = [row for content in contents.values() for row in content["results"]]
    return Record(benchmark, hardware, tuple(contents), facts, rows)
