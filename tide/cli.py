"""``python -m tide``: make, read and prove plans from the command line.

Exit status: 0 if all is well, 1 if TIDE refuses or a proof fails (one line on stderr), 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

from tide.compiler.options import PlanOptions, with_prefetch
from tide.errors import InputError, TideError
from tide.plan import Plan
from tide.planning import compile_plan, load_plan
from tide.topology import PRESETS, Topology

_EXAMPLES = """examples:
  python -m tide plan llama-3.1-70b --nodes 8 --gpus 8 --json plan.json
  python -m tide show plan.json
  python -m tide verify plan.json
  python -m tide graph plan.json --parameter model.layers.0.self_attn.q_proj.weight --rank 3
  python -m tide svg plan.json schedule --unit model.layers.0 --output schedule.svg
  python -m tide trace plan.json --unit model.layers.0 --output trace.json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit status."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = chosen.run
    try:
        return run(chosen)
    except TideError as error:
        print(f"tide: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader, `head` say, has seen enough
            sys.stdout = None
            return 0
        print(f"tide: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tide",
        description="Plans of zero-copy collectives for FSDP2: make, read and prove them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    plan = commands.add_parser("plan", help="compile the plan of a model and show it")
    plan.add_argument(
        "model",
        metavar="MODEL",
        help="a public model such as llama-3.1-70b (case does not matter), a .json list of names and shapes, "
        "a .safetensors file or its index",
    )
    plan.add_argument("--nodes", type=_count, default=1, help="nodes (NVLink domains); 1 by default")
    plan.add_argument("--gpus", type=_count, default=8, help="GPUs a node; 8 by default")
    plan.add_argument("--links", choices=sorted(PRESETS), default="h200", help="link figures for predictions")
    plan.add_argument("--rank", type=int, default=0, help="rank that the report is for; 0 by default")
    slots = plan.add_mutually_exclusive_group()
    slots.add_argument(
        "--slots",
        type=_slots,
        default=2,
        help="modules that are whole in turn, or 'all' for a slot a unit; 2 by default",
    )
    slots.add_argument("--prefetch", type=int, help="modules that are gathered ahead, instead of --slots: one fewer")
    plan.add_argument(
        "--memory-limit",
        type=_nbytes,
        metavar="SIZE",
        help="bytes a rank may need, e.g. 40GiB: chooses options that fit",
    )
    plan.add_argument("--dtype", default="bfloat16", help="element type of storage, or 'keep'; bfloat16 by default")
    plan.add_argument(
        "--reduce-dtype", default="float32", help="type of reduced gradients, or 'keep'; float32 by default"
    )
    plan.add_argument("--shard-dtype", default="keep", help="type of the shards; 'keep' by default: the model's own")
    plan.add_argument("--json", metavar="FILE", help="write the plan as JSON; '-' prints it instead of the report")
    plan.set_defaults(run=_plan)

    show = _reader(commands, "show", _show, "show the report of a plan")
    show.add_argument("--rank", type=int, help="rank that the report is for")
    show.add_argument("--json", metavar="FILE", help="write the report as JSON; '-' prints it instead")

    proof = _reader(commands, "verify", _verify, "prove a plan in full")
    proof.add_argument("--ranks", type=_ranks, help="only these, e.g. 0,8-15; all by default")
    proof.add_argument("--json", metavar="FILE", help="write the proof as JSON; '-' prints it instead")

    graph = _reader(commands, "graph", _graph, "list descriptors: which bytes of whose shard lie where")
    graph.add_argument("--parameter", metavar="NAME", help="only this parameter")
    graph.add_argument("--unit", metavar="NAME", help="only this unit; '' or root for the root's")
    graph.add_argument("--rank", type=int, help="only into the storage of this rank")
    graph.add_argument("--json", metavar="FILE", help="write networkx node-link JSON; '-' prints it instead")

    picture = _reader(commands, "svg", _svg, "draw the arena, a parameter or a schedule")
    picture.add_argument("what", choices=("arena", "parameter", "schedule"))
    picture.add_argument("--parameter", metavar="NAME", help="for 'parameter'")
    _collective(picture)
    picture.add_argument("--output", "-o", metavar="FILE", default="-", help="'-', the default, prints it")

    trace = _reader(commands, "trace", _trace, "write the predicted course of a collective as a Chrome trace")
    _collective(trace)
    trace.add_argument("--output", "-o", metavar="FILE", default="-", help="'-', the default, prints it")
    return parser


def _reader(commands: Any, name: str, run: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    parser.add_argument("plan", metavar="PLAN.json", help="written by 'tide plan --json' or Plan.to_json")
    parser.set_defaults(run=run)
    return parser


def _collective(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--unit", metavar="NAME", help="unit; the last one by default")
    parser.add_argument(
        "--collective", choices=("all_gather", "reduce_scatter"), default="all_gather", help="all_gather by default"
    )
    parser.add_argument("--rank", type=int, help="rank; the plan's by default")


# Types of arguments: a ValueError becomes a usage message and status 2 ---------------------------------


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def _slots(text: str) -> int | None:
    return None if text == "all" else _count(text)


def _nbytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"no size in {text!r}; write for example 40GiB, 40GB or 42949672960")
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix or " "))


def _ranks(text: str) -> list[int]:
    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            found = range(int(first), int(last if dash else first) + 1)
        except ValueError:
            found = range(0)
        if not found:
            raise argparse.ArgumentTypeError(f"no ranks in {part!r}; write for example 0,8-15")
        ranks += found
    return ranks


# Commands ----------------------------------------------------------------------------------------------


def _plan(chosen: argparse.Namespace) -> int:
    from tide.compiler.read import Policy, read
    from tide.compiler.shapes import MODELS, model_parameters

    topology = Topology(chosen.nodes, chosen.gpus, PRESETS[chosen.links])
    types = (None if name == "keep" else name for name in (chosen.dtype, chosen.reduce_dtype, chosen.shard_dtype))
    policy = Policy(*types)
    public = {name.lower(): name for name in MODELS}
    name = public.get(chosen.model.lower())
    if name is not None:
        spec = replace(read(model_parameters(name), topology=topology, policy=policy), source=name)
    elif Path(chosen.model).suffix in (".json", ".safetensors") or Path(chosen.model).exists():
        spec = read(chosen.model, topology=topology, policy=policy)
    else:
        raise InputError(f"no file and no public model {chosen.model!r}; public models are {', '.join(MODELS)}")
    options = with_prefetch(PlanOptions(slots=chosen.slots if chosen.prefetch is None else None), chosen.prefetch)
    plan = compile_plan(spec, topology=topology, rank=chosen.rank, options=options, memory_limit=chosen.memory_limit)
    if chosen.json == "-":
        print(plan.to_json())
        return 0
    if chosen.json:
        plan.to_json(chosen.json)
    _say(str(plan.report()))
    return 0


def _load(chosen: argparse.Namespace) -> Plan:
    if not Path(chosen.plan).is_file():
        raise InputError(f"no file {chosen.plan}; write one with 'tide plan MODEL --json FILE'")
    return load_plan(Path(chosen.plan), rank=getattr(chosen, "rank", None))


def _show(chosen: argparse.Namespace) -> int:
    report = _load(chosen).report()
    if chosen.json:
        _write(chosen.json, json.dumps(report.to_dict(), indent=1))
    if chosen.json != "-":
        _say(str(report))
    return 0


def _verify(chosen: argparse.Namespace) -> int:
    plan = _load(chosen)
    proof = plan.verify(ranks=chosen.ranks)
    if chosen.json:
        values = asdict(proof) if is_dataclass(proof) else {"proof": str(proof)}
        _write(chosen.json, json.dumps({"digest": plan.digest, **values}, default=str))
    if chosen.json != "-":
        _say(f"{plan!r}\n{proof}")
    return 0


def _graph(chosen: argparse.Namespace) -> int:
    from tide.compiler.scatter import descriptor_graph, descriptors, locate

    plan = _load(chosen)
    unit = None if chosen.unit is None else _unit(plan, chosen.unit)
    if chosen.json:
        import networkx as nx

        graph = descriptor_graph(plan.compiled, unit, chosen.parameter, chosen.rank)
        _write(chosen.json, json.dumps(nx.node_link_data(graph, edges="edges")))
        if chosen.json == "-":
            return 0
    if unit is None and chosen.parameter is not None:
        unit = locate(plan.compiled, chosen.parameter)[0].name
    units = [found.name for found in plan.units] if unit is None else [unit]
    form = "{:>6}  {:>6}  {:>14}  {:>16}  {:>9}  {:>12}  {:>12}  {:>12}  {}"
    lines = ["from", "to", "slot offset", "arena offset", "runs", "run bytes", "shard pitch", "pitch", "parameter"]
    print(form.format(*lines))
    for name in units:
        if chosen.rank is not None and plan.spec.unit(name).mesh.locate(chosen.rank) is None:
            continue
        for d in descriptors(plan.compiled, name, chosen.parameter, chosen.rank):
            figures = (d.source_rank, d.destination_rank, d.slot_offset, d.arena_offset, d.runs, d.run_bytes)
            print(form.format(*figures, d.source_pitch, d.destination_pitch, d.parameter))
    return 0


def _svg(chosen: argparse.Namespace) -> int:
    from tide import report

    plan = _load(chosen)
    if chosen.what == "arena":
        picture = report.arena_svg(plan.compiled)
    elif chosen.what == "parameter":
        if chosen.parameter is None:
            raise InputError("svg parameter: name it with --parameter")
        unit = None if chosen.unit is None else _unit(plan, chosen.unit)
        picture = report.parameter_svg(plan.compiled, unit, chosen.parameter, chosen.rank)
    else:
        unit = _unit(plan, chosen.unit)
        picture = report.schedule_svg(plan.compiled, unit, chosen.collective, plan.rank)
    _write(chosen.output, picture)
    return 0


def _trace(chosen: argparse.Namespace) -> int:
    from tide.report import chrome_trace

    plan = _load(chosen)
    trace = chrome_trace(plan.compiled, _unit(plan, chosen.unit), chosen.collective, plan.rank)
    _write(chosen.output, json.dumps(trace))
    return 0


def _unit(plan: Plan, name: str | None) -> str:
    """The unit that a user means; the root's own name is empty."""
    if name is None:
        return plan.units[-1].name
    known = {unit.name for unit in plan.units}
    return "" if name == "root" and name not in known and "" in known else plan.spec.unit(name).name


def _write(where: str, text: str) -> None:
    if where == "-":
        print(text)
    else:
        Path(where).write_text(text, encoding="utf-8")


def _say(text: str) -> None:
    """Prints a report; on a terminal, and if rich is there, with its headings in bold."""
    if sys.stdout is not None and sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.text import Text
        except ImportError:
            pass
        else:
            styled = Text(text)
            styled.highlight_regex(
                r"(?m)^(TIDE plan of [^:\n]*|units .*|collectives .*|memory of rank .*|together .*)$", "bold"
            )
            Console(highlight=False, soft_wrap=True).print(styled)
            return
    print(text)
