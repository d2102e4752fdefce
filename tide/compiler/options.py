"""The choices that a user or the cost model makes for a plan."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from tide.errors import InputError

MIB = 1 << 20
ROUTES = ("push", "pull")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of a plan; part of its hash, so all ranks must agree on them.

    Parameters
    ----------
    slots : int or None
        Modules that may be whole one after the other: the one in use and those that are gathered ahead, so one more
        than `prefetch`. Units that are never whole at the same time then share slots, of as many sizes as take the
        least room. None gives every unit storage of its own.
    alignment : int
        Bytes to which every parameter's storage is aligned; a power of two.
    bundle_bytes : int
        Parameters whose shard is at most this large travel together as one bundle: a copy costs
        more than a microsecond whatever its size.
    min_run_bytes : int
        Parameters whose runs are shorter than this are bundled too: copy engines are slow on them.
    put_bytes : int
        Largest put; a rank has one put in flight per destination, so this bounds the bytes in flight.
    chunk_bytes : int or None
        Bytes of one gradient piece in the receive area; None lets the compiler choose.
    route : str
        How shards spread within a node: ``"push"`` (each rank writes its shard to its peers as it is placed) or
        ``"pull"`` (each reads its peers' when they are in place). Pushes were measured faster.
    piece_bytes : int
        Push route: the first piece of a shard that leaves while the next one is being placed; each piece is three
        times the one before.
    receive_depth : int
        Positions of the receive, partial and wire areas (2 = double buffering).
    padded_storage : bool
        Give every parameter FSDP2's padded size (needed where FSDP2 slices the padding).
    """

    slots: int | None = None
    alignment: int = 512
    bundle_bytes: int = 32 << 10
    min_run_bytes: int = 512
    put_bytes: int = 64 * MIB
    route: str = "push"
    piece_bytes: int = 12 * MIB
    chunk_bytes: int | None = None
    receive_depth: int = 2
    padded_storage: bool = False

    def __post_init__(self) -> None:
        def check(name: str, low: int) -> None:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise InputError(f"PlanOptions: {name} must be a whole number of at least {low}, got {value!r}")

        if self.slots is not None:
            check("slots", 1)
        if self.chunk_bytes is not None:
            check("chunk_bytes", 256)
        for name, low in (
            ("alignment", 16),
            ("bundle_bytes", 0),
            ("min_run_bytes", 0),
            ("put_bytes", 4096),
            ("piece_bytes", 512),
            ("receive_depth", 1),
        ):
            check(name, low)
        if self.route not in ROUTES:
            raise InputError(f"PlanOptions: route must be one of {', '.join(ROUTES)}, got {self.route!r}")
        if self.alignment & (self.alignment - 1):
            raise InputError(f"PlanOptions: alignment must be a power of two, got {self.alignment}")

    @property
    def prefetch(self) -> int | None:
        """Modules that are gathered ahead of the one in use; None where every unit has storage of its own."""
        return None if self.slots is None else self.slots - 1

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def with_prefetch(options: PlanOptions, prefetch: int | None) -> PlanOptions:
    """The options with as many slots as gathering ``prefetch`` modules ahead takes; as they are for None.

    Raises
    ------
    InputError
        If the options say otherwise, or it is no whole number of at least 0.
    """
    if prefetch is None:
        return options
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise InputError(f"prefetch must be a whole number of at least 0, got {prefetch!r}")
    if options.slots not in (None, prefetch + 1):
        raise InputError(
            f"prefetch={prefetch} takes {prefetch + 1} slots, but slots is {options.slots}; give one of both"
        )
    return replace(options, slots=prefetch + 1)
