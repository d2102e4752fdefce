"""The choices that a user or the cost model makes for a plan."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tide.errors import InputError

MIB = 1 << 20
ROUTES = ("push", "pull")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of a plan; part of its hash, so all ranks must agree on them.

    Parameters
    ----------
    slots : int or None
        Slots that the units of one kind share in turn; None gives every unit storage of its own.
    alignment : int
        Bytes to which every parameter's storage is aligned; a power of two.
    bundle_bytes : int
        Parameters whose shard is at most this large travel together as one bundle: a copy costs
        more than a microsecond whatever its size.
    min_run_bytes : int
        Parameters whose runs are shorter than this are bundled too: copy engines are slow on them.
    min_put_run_bytes : int
        The same where the unit's ranks are on several nodes: a strided run is then a put of its own, which costs
        the network about what this many bytes do. It costs the slot the parameter's bytes a second time.
    put_bytes : int
        Largest put; a rank has one put in flight per destination, so this bounds the bytes in flight.
    chunk_bytes : int or None
        Bytes of one gradient piece in the receive area; None lets the compiler choose.
    route : str
        How shards spread within a node: ``"push"`` (each rank writes its shard to its peers as it is placed) or
        ``"pull"`` (each reads its peers' when they are in place). Pushes were measured faster.
    piece_bytes : int
        Push route: bytes of the first piece of a shard at least, which leaves while the next one is being placed; the
        pieces grow by the speed of casts over that of pushes.
    receive_depth : int
        Positions of the receive, partial and wire areas (2 = double buffering).
    padded_storage : bool
        Give every parameter FSDP2's padded size (needed where FSDP2 slices the padding).
    """

    slots: int | None = None
    alignment: int = 512
    bundle_bytes: int = 32 << 10
    min_run_bytes: int = 512
    min_put_run_bytes: int = 32 << 10
    put_bytes: int = 64 * MIB
    route: str = "push"
    piece_bytes: int = 4 * MIB
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
            ("min_put_run_bytes", 0),
            ("put_bytes", 4096),
            ("piece_bytes", 64),
            ("receive_depth", 1),
        ):
            check(name, low)
        if self.route not in ROUTES:
            raise InputError(f"PlanOptions: route must be one of {', '.join(ROUTES)}, got {self.route!r}")
        if self.alignment & (self.alignment - 1):
            raise InputError(f"PlanOptions: alignment must be a power of two, got {self.alignment}")

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
