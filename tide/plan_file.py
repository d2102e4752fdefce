"""Plans as JSON text: what went in and the digest; loading compiles again and compares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tide.compiler.compile import FORMAT, Compiled, compile_spec, spec_from_dict, spec_to_dict
from tide.compiler.options import PlanOptions
from tide.errors import InputError
from tide.topology import Links, Topology


def dump_plan(compiled: Compiled, rank: int) -> str:
    """JSON text of a plan and of the rank that holds it."""
    topology = compiled.topology
    data = {
        "tide_plan": FORMAT,
        "digest": compiled.digest,
        "rank": rank,
        "topology": {
            "nodes": topology.nodes,
            "gpus_per_node": topology.gpus_per_node,
            "links": {name: getattr(topology.links, name) for name in topology.links.__slots__},
            "virtual": topology.virtual,
        },
        "options": compiled.options.to_dict(),
        "spec": spec_to_dict(compiled.spec),
    }
    return json.dumps(data, separators=(",", ":"))


def parse_plan(source: str | Path) -> tuple[Compiled, Any]:
    """Compiles what :func:`dump_plan` wrote; returns it with the rank as it stands there.

    Parameters
    ----------
    source : str or Path
        A file, or the JSON text itself.

    Raises
    ------
    InputError
        If the text is no plan, is of another format version, or does not compile to the digest it states.
    """
    if not isinstance(source, str | Path):
        raise InputError(f"load_plan: expected a path or JSON text, got {type(source).__name__}")
    text = str(source)
    if not text.lstrip().startswith("{"):
        try:
            text = Path(source).read_text()
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise InputError(f"load_plan: no file to read at {text[:80]!r} ({type(error).__name__})") from None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"load_plan: not JSON ({error}); pass a file that Plan.to_json wrote") from None
    except (ValueError, RecursionError) as error:  # JSON, but of numbers or a depth that Python does not take
        raise InputError(f"load_plan: the file is damaged ({error}); write it again with Plan.to_json") from None
    if not isinstance(data, dict) or "tide_plan" not in data:
        raise InputError("load_plan: no 'tide_plan' field; pass a file that Plan.to_json wrote")
    if data["tide_plan"] != FORMAT:
        raise InputError(
            f"load_plan: the file is of plan format {data['tide_plan']}, this version reads {FORMAT}; compile it again"
        )
    try:
        topology = Topology(**{**data["topology"], "links": Links(**data["topology"]["links"])})
        compiled = compile_spec(spec_from_dict(data["spec"]), topology, PlanOptions(**data["options"]))
        stated, rank = str(data["digest"]), data["rank"]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise InputError(f"load_plan: the file is damaged ({error!r}); write it again with Plan.to_json") from error
    if compiled.digest != stated:
        raise InputError(
            f"load_plan: compiles to digest {compiled.digest[:12]}, the file states {stated[:12]}; it was edited"
        )
    return compiled, rank
