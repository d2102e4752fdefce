"""What a model trains on, by a short text: ``stock``, ``free``, ``symm:32``, ``tide:64/32+slots=3``.

::

    stock                 FSDP2 with NCCL
    free                  FSDP2 whose collectives do nothing (its copies stay)
    symm                  FSDP2 with symmetric memory; ``symm:own`` and others, see ``baselines.SCATTERS``
    tide                  TIDE, with ``reuse_forward=True`` as in the README
    tide:64/32            CTAs of its kernels, place/accumulate
    tide+slots=3+route=pull    fields of PlanOptions, or arguments of tide.attach; a bare name means True

``tide-regather`` is short for ``tide+reuse_forward=0``, ``tide-early`` for ``tide+early_reduce``.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from torch import nn

import tide
from baselines import ORDINARY, SCATTERS, detach_baseline, use_free_collectives, use_symmetric_memory
from tide.compiler.options import PlanOptions
from tide.transport.cuda import CudaTransport, Settings

NAMES = ("stock", "free", "symm", "tide")
SHORT = {"tide-regather": "tide+reuse_forward=0", "tide-early": "tide+early_reduce"}
#: Arguments of ``tide.attach`` that a text may set, with their defaults; the others are the benchmark's.
ARGUMENTS = {
    name: parameter.default
    for name, parameter in inspect.signature(tide.attach).parameters.items()
    if name not in ("model", "transport", "topology", "options", "strict", "slots")
}


@dataclass(frozen=True)
class Variant:
    """A parsed text.

    Attributes
    ----------
    name : str
        One of `NAMES`.
    detail : str
        What stands behind the colon.
    options, arguments : dict
        Fields of ``PlanOptions``, and arguments of ``tide.attach``.
    """

    name: str
    detail: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)

    def settings(self) -> Settings:
        """Settings of the CUDA transport."""
        if not self.detail:
            return Settings()
        place, accumulate = map(int, self.detail.split("/"))
        return Settings(place_ctas=place, accumulate_ctas=accumulate)


def parse(text: str) -> Variant:
    """Reads a text; what it cannot mean is an error before anything is measured.

    Raises
    ------
    ValueError
        With what there is.
    """
    first, *others = text.split("+")
    head, *changes = [*SHORT.get(first, first).split("+"), *others]
    name, _, detail = head.partition(":")
    if name not in NAMES:
        raise ValueError(f"no variant {text!r}; there are {', '.join(NAMES)}")
    if changes and name != "tide":
        raise ValueError(f"variant {text!r}: only tide takes options")
    if detail and (
        name in ("stock", "free") or (name == "symm" and detail not in (*SCATTERS, ORDINARY) and not detail.isdigit())
    ):
        raise ValueError(
            f"variant {text!r}: symm takes {', '.join((*SCATTERS, ORDINARY))} or a number of CTAs behind the colon"
        )
    known = {entry.name for entry in fields(PlanOptions)}
    options: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for change in changes:
        key, given, value = change.partition("=")
        if key not in known and key not in ARGUMENTS:
            raise ValueError(
                f"variant {text!r}: no option {key!r}; there are {', '.join((*sorted(known), *ARGUMENTS))}"
            )
        (options if key in known else arguments)[key] = _value(value) if given else True
    for key, default in ARGUMENTS.items():
        if isinstance(default, bool) and isinstance(arguments.get(key), int):
            arguments[key] = bool(arguments[key])
    variant = Variant(name, detail, options, arguments)
    if name == "tide":
        PlanOptions(**options)
        variant.settings()
    return variant


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def set_up(model: nn.Module, variant: Variant, reuse_forward: bool = True) -> tuple[int, Any]:
    """Gives a ``fully_shard``-ed model its collectives. Collective.

    Returns
    -------
    int
        Bytes held outside of torch's allocator.
    Attachment or None
        TIDE's.
    """
    if variant.name == "free":
        return use_free_collectives(model), None
    if variant.name == "symm":
        return use_symmetric_memory(model, variant.detail), None
    if variant.name == "stock":
        return 0, None
    attachment = tide.attach(
        model,
        strict=True,
        transport=partial(CudaTransport.open, settings=variant.settings()),
        options=PlanOptions(**variant.options),
        **{"reuse_forward": reuse_forward, **variant.arguments},
    )
    assert attachment.compiled is not None
    return attachment.compiled.arena.size, attachment


def tear_down(model: nn.Module, variant: Variant) -> None:
    """Gives the model back to FSDP2. Collective."""
    if variant.name == "tide":
        tide.detach(model)
    detach_baseline(model)
