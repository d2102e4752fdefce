"""Arbitrary small changes of programs, right or wrong: whatever `verify` lets pass must run right."""

from __future__ import annotations

import random
from dataclasses import fields, is_dataclass, replace
from typing import Any

from tide.compiler.compile import Compiled
from tide.compiler.steps import Buffer, Lane, Region, Step, Stream


def mutate(compiled: Compiled, unit: str, collective: str, rng: random.Random) -> tuple[Compiled, str]:
    """The plan with one change in one rank's program, and what was changed."""
    group = next(u for u in compiled.spec.units if u.name == unit).mesh.groups[0]
    rank = rng.choice(group)
    program = compiled.program(unit, collective, rank)
    streams = [list(stream.steps) for stream in program.streams]
    at = rng.choice([n for n, steps in enumerate(streams) if steps] or [0])
    if not streams[at]:
        return compiled, "nothing to change"
    index = rng.randrange(len(streams[at]))
    step = streams[at][index]
    kind = rng.choice(("field", "field", "field", "field", "delete", "swap", "move", "repeat", "other stream"))
    if kind == "field":
        changed = _changed(step, rng, len(group))
        streams[at][index] = changed
        text = f"{step} becomes {changed}"
    else:
        text = f"{kind}: {step}"
        if kind == "delete":
            del streams[at][index]
        elif kind == "swap":
            other = min(index + 1, len(streams[at]) - 1)
            streams[at][index], streams[at][other] = streams[at][other], streams[at][index]
        elif kind == "move":
            streams[at].insert(rng.randrange(len(streams[at])), streams[at].pop(index))
        elif kind == "repeat":
            streams[at].insert(index, step)
        else:
            to = rng.randrange(len(streams))
            streams[to].insert(rng.randint(0, len(streams[to])), streams[at].pop(index))
    made = tuple(Stream(old.name, tuple(steps)) for old, steps in zip(program.streams, streams, strict=True))
    name = program.streams[at].name
    damaged = compiled.with_program(unit, rank, replace(program, streams=made))
    return damaged, f"unit {unit!r} rank {rank} {name}[{index}] {text}"


def _changed(value: Any, rng: random.Random, positions: int, name: str = "") -> Any:
    """The value with one of its parts changed."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, Lane):
        return rng.choice(list(Lane))
    if isinstance(value, Buffer):
        return rng.choice(list(Buffer))
    if isinstance(value, int):
        if name == "peer":
            return rng.randrange(positions)
        return max(0, value + rng.choice((-256, -64, -8, -4, -2, -1, 1, 2, 4, 8, 64, 256)))
    if isinstance(value, str):
        return rng.choice(("float32", "bfloat16", "float16", "uint8"))
    if isinstance(value, Region):
        return _part(value, value._fields, rng, positions, lambda v, **kw: v._replace(**kw))
    if hasattr(value, "_fields"):
        return _part(value, value._fields, rng, positions, lambda v, **kw: v._replace(**kw))
    if isinstance(value, tuple):
        if not value:
            return value
        at = rng.randrange(len(value))
        kind = rng.random()
        if kind < 0.15:
            return (*value[:at], *value[at + 1 :])
        if kind < 0.25:
            return (*value[:at], value[at], *value[at:])
        if kind < 0.35:
            other = rng.randrange(len(value))
            swapped = list(value)
            swapped[at], swapped[other] = swapped[other], swapped[at]
            return tuple(swapped)
        return (*value[:at], _changed(value[at], rng, positions), *value[at + 1 :])
    if is_dataclass(value):
        return _part(value, [f.name for f in fields(value)], rng, positions, replace)
    return value


def _part(value: Any, names: Any, rng: random.Random, positions: int, set_: Any) -> Any:
    name = rng.choice(list(names))
    return set_(value, **{name: _changed(getattr(value, name), rng, positions, name)})


__all__ = ["Step", "mutate"]
