"""The report of a plan: one row per kind of unit, totals, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tide.compiler.compile import Compiled
from tide.compiler.cost import Prediction, predict
from tide.errors import InputError
from tide.report import units as about
from tide.report.memory import EXCLUDED, Memory, memory, unsharded_nbytes, with_slot_reuse


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted cost of one collective, without its steps; seconds and bytes. See :class:`Prediction`."""

    seconds: float
    released: float
    sm_seconds: float
    kernels: int
    transfers: int
    puts: int
    nvlink_bytes: int
    network_bytes: int
    network_bytes_in: int
    bound: str
    assumed: int

    @classmethod
    def of(cls, found: Prediction) -> Cost:
        """The figures of a prediction."""
        return cls(**{name: getattr(found, name) for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class UnitRow:
    """Units that are planned alike. Figures are those of one unit, on the report's rank.

    Attributes
    ----------
    units : tuple of str
        Names, in forward order.
    label : str
        First and last name and the number of units.
    parameters : int
        Parameters of one unit.
    numel : int
        Their elements.
    nbytes, stock_nbytes : int
        Bytes of the whole unit in storage, and as stock FSDP2 gathers it, with padding.
    ranks : int
        Shards.
    descriptors : int
        Descriptors into this rank's storage.
    transfers : int
        Copies and puts of this rank's all-gather, after neighbours have merged.
    all_gather_route, reduce_scatter_route : str
        Route and engine in a word.
    all_gather_reason, reduce_scatter_reason : str
        In a sentence, with the reason.
    bundled, bundle_nbytes : int
        Parameters in the bundle and its bytes; 0 without one.
    bundle_reason, slot_reason : str
        Why.
    slots : tuple of int
        Slots that the units use.
    slot_nbytes : int
        Bytes of the largest of them.
    all_gather : Cost
        Prediction.
    reduce_scatter : Cost or None
        Prediction; None if all parameters are frozen.
    stock_refuses : tuple of str
        Parameters that stock FSDP2 cannot shard: dim above 0, uneven.
    """

    units: tuple[str, ...]
    label: str
    parameters: int
    numel: int
    nbytes: int
    stock_nbytes: int
    ranks: int
    descriptors: int
    transfers: int
    all_gather_route: str
    all_gather_reason: str
    reduce_scatter_route: str
    reduce_scatter_reason: str
    bundled: int
    bundle_nbytes: int
    bundle_reason: str
    slots: tuple[int, ...]
    slot_nbytes: int
    slot_reason: str
    all_gather: Cost
    reduce_scatter: Cost | None
    stock_refuses: tuple[str, ...]

    @property
    def count(self) -> int:
        """Number of units."""
        return len(self.units)

    @property
    def padding_avoided(self) -> int:
        """Bytes that stock FSDP2 gathers for one unit and TIDE does not."""
        return self.stock_nbytes - self.nbytes

    @property
    def padding_percent(self) -> float:
        """Padding relative to the unit's own bytes."""
        return 100 * self.padding_avoided / self.nbytes if self.nbytes else 0.0


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What a plan does, unit by unit, and what it needs; times are predictions from `links`.

    Attributes
    ----------
    source, topology, digest : str
        Which plan.
    rank : int
        World rank that the figures are for.
    options, links : dict
        Choices, and rates and latencies that the predictions start from.
    rows : tuple of UnitRow
        One per kind of unit.
    memory : Memory
        Composition of the rank's peak, next to FSDP2's.
    arena_nbytes : int
        Bytes of the arena.
    elsewhere : tuple of str
        Units of which the rank holds no shard.
    skipped : tuple of (str, str)
        Parameters outside of the plan, with the reason.
    remarks : tuple of str
        What was given up to fit a memory limit.
    opened : tuple of str
        Of each open transport: its name, what its arena is made of, and how long that took.
    """

    source: str
    topology: str
    rank: int
    digest: str
    options: dict[str, object]
    links: dict[str, float]
    rows: tuple[UnitRow, ...]
    memory: Memory
    arena_nbytes: int
    elsewhere: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    remarks: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()

    @property
    def totals(self) -> dict[str, float]:
        """Sums over all units: counts, bytes, and seconds as if the collectives ran one after the other."""

        def total(value: object) -> float:
            return sum(row.count * value(row) for row in self.rows)  # type: ignore[operator]

        nbytes, stock = total(lambda row: row.nbytes), total(lambda row: row.stock_nbytes)
        return {
            "units": total(lambda row: 1),
            "parameters": total(lambda row: row.parameters),
            "numel": total(lambda row: row.numel),
            "nbytes": nbytes,
            "stock_nbytes": stock,
            "padding_avoided": stock - nbytes,
            "padding_percent": 100 * (stock - nbytes) / nbytes if nbytes else 0.0,
            "descriptors": total(lambda row: row.descriptors),
            "transfers": total(lambda row: row.transfers),
            "all_gather_seconds": total(lambda row: row.all_gather.seconds),
            "reduce_scatter_seconds": total(lambda row: row.reduce_scatter.seconds if row.reduce_scatter else 0.0),
            "all_gather_sm_seconds": total(lambda row: row.all_gather.sm_seconds),
            "reduce_scatter_sm_seconds": total(
                lambda row: row.reduce_scatter.sm_seconds if row.reduce_scatter else 0.0
            ),
        }

    def to_dict(self) -> dict[str, object]:
        """Plain values, ready for JSON; bytes and seconds."""
        rows = []
        for row in self.rows:
            values = asdict(row)
            values.update(count=row.count, padding_avoided=row.padding_avoided, padding_percent=row.padding_percent)
            rows.append(values)
        peak: dict[str, object] = {"excluded": EXCLUDED, "peaks": dict(self.memory.peaks)}
        peak.update({column: self.memory.total(column) for column in self.memory.peaks})
        peak["rows"] = [asdict(row) for row in self.memory.rows]
        return {
            "source": self.source,
            "topology": self.topology,
            "rank": self.rank,
            "digest": self.digest,
            "options": dict(self.options),
            "links": dict(self.links),
            "units": rows,
            "totals": self.totals,
            "memory": peak,
            "arena_nbytes": self.arena_nbytes,
            "elsewhere": list(self.elsewhere),
            "skipped": [list(entry) for entry in self.skipped],
            "remarks": list(self.remarks),
            "opened": list(self.opened),
        }

    def __str__(self) -> str:
        from tide.report.text import render

        return render(self)

    def __repr__(self) -> str:
        return f"<tide.PlanReport {self.source or 'model'}: {len(self.rows)} kinds of units; {self.topology}>"

    def _repr_html_(self) -> str:
        from tide.report.page import render

        return render(self)


def plan_report(compiled: Compiled, rank: int, remarks: Sequence[str] = (), opened: Sequence[str] = ()) -> PlanReport:
    """Report of a plan as world rank ``rank`` sees it.

    Parameters
    ----------
    compiled : Compiled
        The plan.
    rank : int
        World rank; units of which it holds no shard are listed by name only.
    remarks : sequence of str, optional
        What was given up to fit a memory limit.
    opened : sequence of str, optional
        Of each open transport, what its arena is.

    Raises
    ------
    InputError
        If the topology has no such rank.
    """
    if not 0 <= rank < compiled.topology.world_size:
        raise InputError(
            f"report: rank {rank} is outside {compiled.topology}, ranks 0..{compiled.topology.world_size - 1}"
        )
    rows = []
    for alike in about.kinds(compiled, rank):
        unit = alike[0]
        layout = compiled.layouts[unit.name]
        slots = sorted({compiled.arena.slot_of[member.name] for member in alike})
        gather, gather_why = about.all_gather_route(compiled, unit, rank)
        reduce, reduce_why = about.reduce_scatter_route(compiled, unit, rank)
        gather_cost = Cost.of(predict(compiled, unit.name, "all_gather", rank))
        trainable = any(p.trainable for p in unit.parameters)
        rows.append(
            UnitRow(
                units=tuple(member.name for member in alike),
                label=about.label([member.name for member in alike]),
                parameters=len(unit.parameters),
                numel=sum(p.numel for p in unit.parameters),
                nbytes=unit.nbytes,
                stock_nbytes=unsharded_nbytes(unit),
                ranks=unit.mesh.size,
                descriptors=about.descriptors(compiled, unit, rank),
                transfers=gather_cost.transfers,
                all_gather_route=gather,
                all_gather_reason=gather_why,
                reduce_scatter_route=reduce,
                reduce_scatter_reason=reduce_why,
                bundled=0 if layout.bundle is None else len(layout.bundle.members),
                bundle_nbytes=0 if layout.bundle is None else int(layout.bundle.length.sum()),
                bundle_reason=about.bundle_reason(compiled, unit),
                slots=tuple(slots),
                slot_nbytes=max(compiled.arena.slots[slot].size for slot in slots),
                slot_reason=about.slot_reason(compiled, alike),
                all_gather=gather_cost,
                reduce_scatter=Cost.of(predict(compiled, unit.name, "reduce_scatter", rank)) if trainable else None,
                stock_refuses=tuple(about.refused_by_stock(unit)),
            )
        )
    links = compiled.topology.links
    return PlanReport(
        source=compiled.spec.source or "model",
        topology=str(compiled.topology),
        rank=rank,
        digest=compiled.digest,
        options=compiled.options.to_dict(),
        links={name: getattr(links, name) for name in links.__slots__},
        rows=tuple(rows),
        memory=memory(compiled, rank, with_slot_reuse(compiled)),
        arena_nbytes=compiled.arena.size,
        elsewhere=tuple(unit.name for unit in compiled.spec.units if unit.mesh.locate(rank) is None),
        skipped=compiled.spec.skipped,
        remarks=tuple(remarks),
        opened=tuple(opened),
    )
