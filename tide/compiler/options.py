"""The choices that a user or the cost model makes for a plan."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from tide.errors import InputError

MIB = 1 << 20
ROUTES = ("push", "pull")
WIRE_DTYPES = ("float32", "bfloat16")
#: Values of the options that concern the switch.
SWITCH = ("off", "on", "auto")


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
    multicast : str
        Push route: ``"on"`` lets a rank write each piece once, to the switch, which hands it to all ranks of the node;
        ``"auto"`` does so where the cost model finds it faster (small units) and the switch can. Units whose group
        does not fill its nodes are pushed peer by peer all the same: a multicast reaches whole nodes.
    piece_bytes : int
        Push route: bytes of the first piece of a shard at least, which leaves while the next one is being placed; the
        pieces grow by the speed of casts over that of pushes.
    receive_depth : int
        Positions of the receive, partial and wire areas (2 = double buffering).
    slot_reuse : bool
        Let a unit's reduce-scatter receive in the unit's own slot, which has been vacated by then: it takes no
        memory of its own. The next all-gather into the slot waits for it. Push route only.
    wire_dtype : str
        Element type of the partial sums between nodes: ``"float32"``, or ``"bfloat16"``, which halves the bytes on
        the wire and rounds each of the other nodes' sums once, by at most 2⁻⁸ of its magnitude.
    switch_reduce : str
        Across nodes: ``"on"`` spreads the other nodes' partial sums over the ranks of the owner's node and sums them
        in the switch; ``"auto"`` does so where the cost model finds it faster (small units) and the switch can. For
        units that are sharded over all ranks, with ``wire_dtype="float32"``. The order of summation is the switch's
        then, and the bits of a result may differ from switch to switch. The CUDA transport wants real nodes that are
        NCCL's NVLink domains; virtual ones run through the stand-in.
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
    multicast: str = "off"
    piece_bytes: int = 4 * MIB
    chunk_bytes: int | None = None
    receive_depth: int = 2
    slot_reuse: bool = False
    wire_dtype: str = "float32"
    switch_reduce: str = "off"
    padded_storage: bool = False

    def __post_init__(self) -> None:
        def check(name: str, low: int, high: int | None = None) -> None:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise InputError(f"PlanOptions: {name} must be a whole number of at least {low}, got {value!r}")
            if high is not None and value > high:
                raise InputError(f"PlanOptions: {name} must be at most {high}, got {value!r}")

        if self.slots is not None:
            check("slots", 1)
        if self.chunk_bytes is not None:
            check("chunk_bytes", 256)
        for name, low in (
            ("bundle_bytes", 0),
            ("min_run_bytes", 0),
            ("min_put_run_bytes", 0),
            ("put_bytes", 4096),
            ("piece_bytes", 64),
        ):
            check(name, low)
        check("alignment", 16, 1 << 30)
        check("receive_depth", 1, 1 << 16)
        if self.route not in ROUTES:
            raise InputError(f"PlanOptions: route must be one of {', '.join(ROUTES)}, got {self.route!r}")
        if self.wire_dtype not in WIRE_DTYPES:
            raise InputError(
                f"PlanOptions: wire_dtype must be one of {', '.join(WIRE_DTYPES)}, got {self.wire_dtype!r}"
            )
        if self.slot_reuse and self.route != "push":
            raise InputError(
                "PlanOptions: slot_reuse needs route='push': peers that pull may still read a slot when it has been "
                "vacated"
            )
        for name in ("multicast", "switch_reduce"):
            if getattr(self, name) not in SWITCH:
                raise InputError(f"PlanOptions: {name} must be one of {', '.join(SWITCH)}, got {getattr(self, name)!r}")
        if self.switch_reduce == "on" and self.wire_dtype != "float32":
            raise InputError(
                f"PlanOptions: switch_reduce='on' needs wire_dtype='float32', got {self.wire_dtype!r}: the switch "
                "would round its sums to that type"
            )
        if self.multicast == "on" and self.route != "push":
            raise InputError(f"PlanOptions: multicast='on' needs route='push', got route={self.route!r}")
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
