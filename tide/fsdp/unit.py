"""One attached parameter group: FSDP2's group on one side, its unit of the plan on the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import is_
from typing import TYPE_CHECKING, Any

import torch

from tide.compiler.model import Unit
from tide.errors import SlotError
from tide.fsdp import introspect, streams, versions
from tide.fsdp.early import EarlyReduction, Part, Terms
from tide.fsdp.flat import FlatOutput
from tide.fsdp.gradients import AgreedGradients
from tide.fsdp.seam import UNIT, Delivered
from tide.fsdp.storage import ParamStorage
from tide.fsdp.virtual import FlatGradients, TideReduceScatter, WholeGradient

if TYPE_CHECKING:
    from tide.fsdp.attachment import Attachment
    from tide.session import Session
    from tide.transport.base import Ticket


#: Method of a group that registers for the end of its backward pass.
_REGISTER = "_register_post_backward_hook"


@dataclass(slots=True)
class Counts:
    """What a unit has done since it was attached.

    Attributes
    ----------
    gathered, reduced : int
        Collectives that TIDE carried out.
    kept : int
        All-gathers for backward that were not needed: the forward's result still stood in the slot.
    declined : int
        Prefetches put off because the slot was still held; FSDP2 asks again when it needs the unit.
    evicted : int
        Prefetches of this unit that nobody had used when another unit needed the slot.
    regathered : int
        Stock all-gathers over the smaller mesh of ``reshard_after_forward=int``, into the slot.
    aside : int
        Stock all-gathers into memory of their own, because another whole unit held the slot.
    early : int
        Reductions of which a part was done while backward still ran through the unit.
    dropped : int
        Such parts that were done for nothing.
    """

    gathered: int = 0
    kept: int = 0
    reduced: int = 0
    declined: int = 0
    evicted: int = 0
    regathered: int = 0
    aside: int = 0
    early: int = 0
    dropped: int = 0

    def __str__(self) -> str:
        shown = [f"{name} {value}" for f in fields(self) if (value := getattr(self, name := f.name))]
        return ", ".join(shown) or "idle"


def _same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Whether two sequences are of the very same objects."""
    return len(these) == len(those) and all(map(is_, these, those))


class AttachedUnit:
    """A parameter group whose collectives TIDE carries out.

    Parameters
    ----------
    name : str
        Of the unit in the plan.
    group : FSDPParamGroup
        FSDP2's side.
    attachment : Attachment
        Knows the other units, one of which may hold this one's slot.
    """

    def __init__(self, name: str, group: Any, attachment: Attachment) -> None:
        self.name, self.group, self.attachment = name, group, attachment
        self.params: list[Any] = list(group.fsdp_params)
        self.counts = Counts()
        self.owners = int(group.mesh_info.shard_mesh_size)
        self._indices = {id(param): index for index, param in enumerate(self.params)}
        self._every = tuple(range(len(self.params)))
        #: Those that FSDP2 would cut into chunks and concatenate.
        self._across = frozenset(i for i, param in enumerate(self.params) if introspect.shard_dim(param) != 0)
        self._storages = [ParamStorage(param, group) for param in self.params]
        self._stock_comm: Any = None
        self._comm = TideReduceScatter(self)
        self._session: Session | None = None
        self._flat: FlatOutput | None = None
        self._agreed: AgreedGradients | None = None
        self._factors: tuple[tuple[Any, float | None], tuple[float, float]] | None = None
        self._ticket: Ticket | None = None
        self._claim: Ticket | None = None
        self._aside = False
        #: The forward pass's all-gather, and what it was made of: the step and the versions of the shards.
        self._forward: tuple[Ticket, tuple[int, ...]] | None = None
        #: Its inputs needed no gradient, so FSDP2 reshards it only at the very end of a backward pass.
        self.ends_late = False
        self._given: tuple[tuple[int, ...], list[torch.Tensor]] = (), []
        self._released: Any = None
        self._stream: Any = None
        #: Reduces a part of the gradients before backward has ended, if asked to.
        self.early: EarlyReduction | None = None
        self._part: Part | None = None

    # Binding -----------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """What carries the plan out."""
        assert self._session is not None, "the unit is not bound"
        return self._session

    @property
    def spec(self) -> Unit:
        """The plan's unit: its parameters, their types and which of them are trained."""
        return self.session.compiled.spec.unit(self.name)

    @property
    def flat(self) -> FlatOutput:
        """What FSDP2 wants the reduced gradients in."""
        assert self._flat is not None, "the unit is not bound"
        return self._flat

    def check_movable(self) -> None:
        """Refuses, where the whole parameters cannot be laid elsewhere at the moment."""
        for storage in self._storages:
            storage.check_movable()

    def bind(self, session: Session) -> None:
        """Lays the whole parameters on the plan's storage; the group must be resharded."""
        self._session = session
        _, position = session.compiled.group(self.name, session.rank)
        self._flat = FlatOutput(session.compiled.spec.unit(self.name), self.owners, position)
        self._agreed = AgreedGradients(self)
        last = len(self._storages) - 1
        for index, storage in enumerate(self._storages):
            memory = session.transport.alias(self.name, index)
            storage.point(memory, self.vacate if index == last else None)
            storage.withhold()
            setattr(storage.param, UNIT, self)
        self._stock_comm = self.group._reduce_scatter_comm
        if versions.own_comm(self._stock_comm):
            self.group._reduce_scatter_comm = self._comm
        if hasattr(self.group, _REGISTER):
            setattr(self.group, _REGISTER, self._noting_inputs(getattr(self.group, _REGISTER)))
        if self.attachment.early_reduce:
            self.early = EarlyReduction(self)

    def unbind(self) -> None:
        """Gives the group back to FSDP2; it must be resharded."""
        if self._session is None:
            return
        if self.early is not None:
            self.early.close()
        for storage in self._storages:
            storage.unpoint()
            storage.param.__dict__.pop(UNIT, None)
        if self.group._reduce_scatter_comm is self._comm:  # else the user has set one since
            self.group._reduce_scatter_comm = self._stock_comm
        self.group.__dict__.pop(_REGISTER, None)
        self._session = self._ticket = self._claim = self._forward = self.early = None

    def _noting_inputs(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """FSDP2's registration for the end of backward, which happens on inputs that need a gradient."""

        def register(args: Any, kwargs: Any) -> Any:
            found = stock(args, kwargs)
            if torch.is_grad_enabled():
                self.ends_late = found[0] is args and found[1] is kwargs
                if self.early is not None:
                    self.early.prepare()
            return found

        return register

    def reshard(self) -> None:
        """Reshards the group, whatever it was gathered for."""
        if self.pending and self._session is not None:
            self.abandon()
        self.group.wait_for_unshard()  # one that FSDP2 gathers itself
        self.group._to_sharded()
        if self._session is not None and self._session.occupant(self.name) == self.name:
            self.vacate()

    @property
    def remark(self) -> str:
        """What of the unit's collectives is not TIDE's, for the report."""
        if not self.reduces:
            return f"; gradients by the user's {type(self.group._reduce_scatter_comm).__name__}"
        return "" if self.early is None else self.early.remark

    # All-gather --------------------------------------------------------------------------------

    @property
    def whole(self) -> bool:
        """Whether the modules now see the whole parameters."""
        return introspect.is_whole(self.group)

    def like(self, other: AttachedUnit) -> bool:
        """Whether both take turns in the same kind of slot."""
        return not self.spec.stays_whole and self.spec.mesh == other.spec.mesh

    @property
    def pending(self) -> bool:
        """Whether an all-gather was issued that no forward or backward has taken up."""
        return introspect.is_pending(self.group)

    def all_gather(self, stock: Callable[[], Any], copy_in: Any, stream: Any, *, prefetch: bool) -> Any:
        """FSDP2's ``foreach_all_gather`` for this unit.

        Parameters
        ----------
        stock : callable
            What FSDP2 would do itself.
        copy_in, stream : Stream
            Where it would copy its inputs, and gather.
        prefetch : bool
            Whether the parameters are wanted later rather than now.

        Returns
        -------
        AllGatherResult or None
            None declines a prefetch: FSDP2 asks again when it needs the parameters.
        """
        holder = self._holder(prefetch)
        if holder is not None and prefetch:
            self.counts.declined += 1
            return None
        if versions.can_swap():
            for storage in self._storages:
                storage.grant()
        if holder is not None:
            self._go_aside(holder)
            return stock()
        if introspect.is_resharded_smaller(self.group):
            # Its input is cut from the whole storage, not the shards that the plan knows: FSDP2 gathers it.
            with streams.on(self.group.device_handle, stream):
                self._claim = self.session.claim(self.name)
            self.counts.regathered += 1
            return stock()
        shards = [param._sharded_param_data for param in self.params]
        if (kept := self._kept()) is not None:
            self._ticket = kept
            self.counts.kept += 1
            return versions.delivered(Delivered(kept, shards))
        if self.params[0].offload_to_cpu and self.group.device.type != "cpu":
            with streams.on(self.group.device_handle, copy_in):
                shards = [tensor.to(self.group.device, non_blocking=True) for tensor in shards]
            stream.wait_stream(copy_in)
        with streams.on(self.group.device_handle, stream):
            self._ticket = self.session.all_gather(self.name, shards)
        reusable = self.attachment.reuse_forward and introspect.is_in_forward(self.group)
        self._forward = (self._ticket, self._made_of()) if reusable else None
        self.counts.gathered += 1
        return versions.delivered(Delivered(self._ticket, shards))

    def _made_of(self) -> tuple[int, ...]:
        """What changes when parameters are edited, sharded or whole, in ways that every rank sees alike.

        Optimizers are counted in ``attachment.steps``: they edit the shards behind these version numbers. Edits
        through ``.data`` leave no trace at all, which is why reuse has to be asked for.
        """
        whole = (getattr(param, "_unsharded_param", None) for param in self.params)
        return (
            self.attachment.steps,
            *(param.sharded_param._version for param in self.params),
            *(-1 if tensor is None else tensor._version for tensor in whole),
        )

    def _kept(self) -> Ticket | None:
        """The forward pass's all-gather, if backward finds its result still in the slot.

        The last units of a forward pass are the first of the backward pass, and nothing has taken their slots.
        Good for one backward pass.
        """
        if not introspect.is_in_backward(self.group):
            return None
        forward, self._forward = self._forward, None
        if forward is None or forward[1] != self._made_of():
            return None
        return forward[0] if self.session.resume(self.name) else None

    def copy_out(self, stock: Callable[[], None]) -> None:
        """FSDP2's copy-out after an all-gather of its own for this unit."""
        if self._claim is not None:
            self._claim.wait()
            self._claim = None
        stock()

    def vacate(self) -> None:
        """The parameters have been resharded; what is still enqueued may read them, nothing later."""
        if self._aside:
            self._aside = False
            for storage in self._storages:
                storage.home()
        elif self.session.occupant(self.name) == self.name:
            self.session.release(self.name)
        self._ticket = None
        if versions.can_swap():
            for storage in self._storages:
                storage.withhold()

    def abandon(self) -> None:
        """Gives up an all-gather that nobody has taken up."""
        if self._ticket is not None:
            self._ticket.wait()
        self.group._all_gather_result = None
        self.vacate()
        self.counts.evicted += 1

    def _holder(self, prefetch: bool) -> AttachedUnit | None:
        """The unit that keeps this one from its slot.

        One that was gathered and not used gives way, but not to another that may not be used either.
        """
        name = self.session.occupant(self.name)
        if name is None or name == self.name:
            return None
        holder = self.attachment.unit(name)
        if holder.whole or (holder.pending and prefetch):
            return holder
        holder.abandon()
        return None

    def _go_aside(self, holder: AttachedUnit) -> None:
        """Lets FSDP2 gather into memory of its own, since the slot holds a unit that is in use."""
        slot = self.session.compiled.arena.slot_of[self.name]
        clash = f"unit {self.name!r} is needed while unit {holder.name!r} is whole in the same slot {slot}"
        if self.attachment.strict or not versions.can_swap():
            raise SlotError(
                f"{clash}; tide.attach(model, slots={self.attachment.slots + 1}) or more lets both be whole at once"
            )
        self.attachment.learn(clash, self, holder)
        for storage in self._storages:
            storage.leave()
        self._aside = True
        self.counts.aside += 1

    # Reduce-scatter ----------------------------------------------------------------------------

    @property
    def reduces(self) -> bool:
        """Whether TIDE sums the gradients, and not a comm object of the user's."""
        return self.group._reduce_scatter_comm is self._comm

    def reduce(self, stock: Callable[[], Any], params: Sequence[Any], grads: list[torch.Tensor], stream: Any) -> Any:
        """FSDP2's ``foreach_reduce`` for this unit: everything but the copy and the sum is FSDP2's own.

        Parameters
        ----------
        stock : callable
            What FSDP2 would do itself.
        params : sequence of FSDPParam
            Those that have a gradient.
        grads : list of Tensor
            Whole gradients; FSDP2 empties the list.
        stream : Stream
            Where FSDP2 sums them.
        """
        if not self.reduces:
            return stock()
        self._comm.reset()
        indices = self._every if _same(params, self.params) else tuple(self._indices[id(param)] for param in params)
        self._given, self._stream = (indices, list(grads)), stream
        self._part = None if self.early is None else self.early.take(list(zip(indices, grads, strict=True)))
        if self._across:
            for position, (index, grad) in enumerate(zip(indices, grads, strict=True)):
                if index in self._across:
                    grads[position] = WholeGradient(grad)
        try:
            result = stock()
        finally:
            self._given, self._part, self._stream = ((), []), None, None
            released, self._released = self._released, None
        return result if released is None else versions.with_inputs_event(result, released)

    def new_output(self, numel: int, flat: FlatGradients, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Flat output of a reduction: the one that holds its early part, or a new one."""
        if self._part is not None:
            terms = self._part.terms
            if (terms.numel, terms.dtype, terms.device) == (numel, dtype, device):
                return self._part.output
        return self.flat.new(self._in_order(flat)[0], numel, dtype, device)

    def reduce_scatter(self, output: torch.Tensor, flat: FlatGradients, op: Any) -> None:
        """Sums the gradients that ``flat`` stands for over the group, each into its place in ``output``."""
        scale, divisor = self._factors_of(op)
        scale /= flat.record.divided
        part, (indices, grads) = self._part, self._in_order(flat)
        if part is not None and (
            part.output is not output or (part.terms.scale, part.terms.divisor) != (scale, divisor)
        ):
            assert self.early is not None
            self.early.give_up(part, "FSDP2 reduces in another way than before")
            part = None
        done: dict[int, torch.Tensor] = {}
        rest: Sequence[torch.Tensor | None] = grads
        if part is not None:
            done = part.sent
            rest = [None if index in done else grad for index, grad in zip(indices, grads, strict=True)]
        sent, outs = self.flat.lay_out(indices, rest, output)
        assert self._agreed is not None, "the unit is not bound"
        self._agreed.check(indices, sent)
        flat.record.kept = sent, done
        tickets = [self.session.reduce_scatter(self.name, sent, outs, scale, divisor)]
        if part is not None:
            tickets.append(part.ticket)
            self.counts.early += 1
        stream = streams.current(self.group.device_handle, self._stream)
        if self.early is not None and part is None:
            self.early.learn(Terms.of(self.group, stream, output, scale, divisor), indices)
        if output.device.type != "cpu":
            # FSDP2 frees the gradients after the event of its inputs: that is when they have been read. Where nothing
            # is left to wait for, the event that it records next says the same.
            tickets = [ticket for ticket in tickets if not ticket.wait_released()]
            if tickets:
                self._released = stream.record_event()
        for ticket in tickets:
            ticket.wait()
        self.counts.reduced += 1

    def _factors_of(self, op: Any) -> tuple[float, float]:
        """Scale and divisor of FSDP2's reduce operation, which is the same object each time as a rule."""
        divide = self.group.gradient_divide_factor
        if self._factors is None or self._factors[0][0] is not op or self._factors[0][1] != divide:
            self._factors = (op, divide), versions.scale_of(op, self.owners, divide)
        return self._factors[1]

    def _in_order(self, flat: FlatGradients) -> tuple[tuple[int, ...], list[torch.Tensor]]:
        """Parameter indices and gradients, in the order in which FSDP2 laid them out."""
        given, found = self._given, flat.record.grads
        if _same(found, given[1]):  # all of them, as they came
            return given
        indices = {id(grad): index for index, grad in zip(*given, strict=True)}
        return tuple(indices[id(grad)] for grad in found), found
