"""``tide.attach`` and ``tide.detach``: FSDP2 trains on TIDE's collectives, and on its own again."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import ModelSpec, Parameter
from tide.compiler.options import PlanOptions, with_prefetch
from tide.compiler.read.fsdp import Reading, Sticky, read_groups
from tide.compiler.verify import verify
from tide.errors import AttachError, InputError, PeerError, TideError
from tide.fsdp import early, introspect, recovery, seam, updates, versions
from tide.fsdp.configuration import agree_on, agree_within, fingerprint, slots_for, why_not
from tide.fsdp.scope import scope_of
from tide.fsdp.unit import AttachedUnit
from tide.plan import Plan
from tide.scope import Scope
from tide.session import Session
from tide.topology import Topology
from tide.transport import open_transport
from tide.transport.base import Transport
from tide.transport.switch import settled

logger = logging.getLogger("tide")

#: Opens a transport for a plan on this rank; collective.
TransportFactory = Callable[[Compiled, int], Transport]

#: Attribute of an ``FSDPState`` that leads to the attachment; detach finds it there.
_ATTACHMENT = "_tide_attachment"


def attach(
    model: torch.nn.Module,
    *,
    transport: str | TransportFactory = "auto",
    strict: bool = False,
    debug: bool = False,
    reuse_forward: bool = False,
    early_reduce: bool = False,
    slots: int | None = None,
    prefetch: int | None = None,
    topology: Topology | None = None,
    options: PlanOptions | None = None,
    ranks: Collection[int] | dist.ProcessGroup | None = None,
) -> Attachment:
    """Lets FSDP2 train ``model`` on TIDE's collectives. Collective over the ranks that hold it, and no others.

    Call it at any time after ``fully_shard``, between steps; nothing else in the training loop changes.
    Parameters, optimizer state, ``state_dict`` and checkpoints stay as they are.

    The ranks are those with which this one shares a mesh of the model's, directly or through others (shard groups,
    HSDP's replicas, tensor-parallel meshes): the whole world or, as with a pipeline's stage, a part of it. A process
    may have several attachments at a time. Attaching, detaching, and the first step after the model was configured
    differently are collective, and nothing tells a model from another of the same shapes: two ranks must do them in
    the same order for all models that both hold.

    Parameters
    ----------
    model : Module
        ``fully_shard``-ed, it or modules inside of it.
    transport : {"auto", "host", "cuda"} or callable
        What moves the bytes; auto takes the one for the model's device. A callable gets the compiled plan and
        the rank in it, and returns an open transport; on part of the world, opened with ``group=`` of the ranks.
    strict : bool
        Raise where a group would be left to stock FSDP2, instead of saying so in the log and the report.
    debug : bool
        Fill a vacated slot with NaN, so that what is still read from it shows. (Where torch can withhold the
        memory, from 2.12 on, using parameters that are resharded is an error anyway, as with stock FSDP2.)
    reuse_forward : bool
        Spare backward the all-gather of units that the forward pass has left in their slots (its last ones): their
        parameters are then those of the forward pass. Optimizer steps, ``load_state_dict`` and in-place operations
        on parameters in between are noticed, edits through ``.data`` are not; stock FSDP2 would gather those.
    early_reduce : bool
        Reduce the gradients that come first in a unit's backward pass while it computes the rest, so that less of
        the last unit's reduction is left over. What comes first is learned in the first backward pass. Every rank
        must run the same graph: where a rank alone has other gradients than before, or changes one after it has
        been accumulated, the step ends with a PeerError that names the unit. Where all ranks do, the unit is reduced
        in one from then on, as without this; edits through ``.data`` of a gradient are not noticed.
        Not with ``PlanOptions(slot_reuse=True)``.
    slots : int, optional
        Modules that may be whole one after the other, see :class:`tide.PlanOptions`; by default what the model's
        prefetching fills, two at least.
    prefetch : int, optional
        Modules that are gathered ahead: another way to say ``slots``, which is one more.
    topology : Topology, optional
        Where the ranks are; by default as the launcher says.
    options : PlanOptions, optional
        Other choices of the plan; its ``slots`` counts where the argument is left out.
    ranks : collection of int or ProcessGroup, optional
        World ranks that hold the model, the same on each of them, where its meshes do not tell. Every shard group
        must lie among them, or none of it.

    Raises
    ------
    AttachError
        If nothing of the model is sharded, it is attached already, a step is under way, or, with ``strict``, a
        group has to run stock.
    InputError
        If options contradict each other, or the meshes do not tell which ranks hold the model.
    CapabilityError
        If this torch or this machine lacks what is needed. The model is as it was then.
    PeerError
        If the ranks hold different models.
    """
    if not introspect.has_fsdp(model):
        raise AttachError(
            f"{type(model).__name__}: neither it nor a module inside of it is fully_shard-ed; call fully_shard first"
        )
    options = options or PlanOptions()
    if slots is not None:
        options = replace(options, slots=slots)
    options = with_prefetch(options, prefetch)
    if early_reduce and options.slot_reuse:
        raise InputError(
            "early_reduce=True and PlanOptions(slot_reuse=True): a unit's early part cannot use its slot, which is in "
            "use until its backward pass has ended, and would go through the small spare areas piece by piece, which "
            "takes longer than it saves; leave one of the two out"
        )
    versions.check()
    versions.check_copy_in()
    for wrapped in introspect.wrapped_modules(model):
        if getattr(wrapped.state, _ATTACHMENT, None) is not None:
            raise AttachError(
                f"{introspect.class_name(model)}: {wrapped.name or 'the model'!r} is attached already; "
                "call tide.detach(model) first"
            )
        if introspect.is_busy(wrapped.state):
            raise AttachError(
                f"{introspect.class_name(model)}: a forward or backward pass is under way; attach between steps "
                "(after an exception in a step, reset_iter_state() of torch 2.13 and later ends it)"
            )
    scope = scope_of(model, ranks)
    return Attachment(model, transport, strict, debug, reuse_forward, early_reduce, topology, options, scope)


def detach(model: torch.nn.Module) -> None:
    """Gives ``model`` back to stock FSDP2. Collective over the ranks that hold it; does nothing if it is not attached.

    After an error of TIDE's (`TideError`) each rank can call it alone, in the middle of the step too. The step is
    given up then, with all of the model's gradients: those that have been reduced are of some parameters only.
    Shards and optimizer state are what they were, but for optimizers that step within backward; a rank that was
    through with its step may be one ahead of the others. Only where a GPU had been given an optimizer step behind the
    collective that failed, it may have run it on worthless gradients: the error says so then, and a checkpoint has to
    be loaded. Where a rank has died, the process groups of stock FSDP2 are of no use either: save the shards and start
    again. With HSDP a failure within one replica does not reach the others, which wait in FSDP2's own all-reduce until
    the timeout of its process group; nor, under pipeline parallelism, does one within a stage reach the other stages.

    Raises
    ------
    AttachError
        If a step is under way, and no error of TIDE's has ended it; after one only while ``backward()`` still runs.
    """
    for wrapped in introspect.wrapped_modules(model):
        found: Attachment | None = getattr(wrapped.state, _ATTACHMENT, None)
        if found is not None:
            found.detach()


class Attachment:
    """A model that trains on TIDE's collectives; made by :func:`attach`.

    Attributes
    ----------
    compiled : Compiled or None
        The plan in use; None if every group runs stock.
    scope : Scope
        The ranks that hold the model.
    slots : int
        Modules that may be whole one after the other.
    strict, debug, reuse_forward, early_reduce : bool
        As given.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        transport: str | TransportFactory,
        strict: bool,
        debug: bool,
        reuse_forward: bool,
        early_reduce: bool,
        topology: Topology | None,
        options: PlanOptions,
        scope: Scope,
    ) -> None:
        self.strict, self.debug, self.scope = strict, debug, scope
        self.reuse_forward, self.early_reduce = reuse_forward, early_reduce
        self.slots = options.slots or 0
        self.compiled: Compiled | None = None
        self._model = model
        self._transport, self._fixed_slots = transport, options.slots
        self._topology = scope.topology(topology)
        self._options = settled(options, self._topology, scope.group())
        self._sticky = Sticky()
        self._readings: list[Reading] = []
        self._units: dict[str, AttachedUnit] = {}
        self._session: Session | None = None
        self._fingerprint: tuple[object, ...] = ()
        #: What has ended the step under way, beside what its transport knows.
        self._failure: str | None = None
        self._said: set[str] = set()
        self.bindings = 0
        #: What units reduced early before the last binding.
        self.early_parts: dict[str, tuple[tuple[Parameter, ...], early.Choice, early.Terms]] = {}
        #: Forward passes of a root that have begun, and steps of any optimizer: what was gathered before one of
        #: them is not taken for what would be gathered after it.
        self.steps = 0
        chosen = {"reuse_forward": reuse_forward, "early_reduce": early_reduce}
        agree_within(self.scope, chosen, "options of attach")
        self._bind()
        seam.install()
        self._uninstall = weakref.finalize(self, seam.uninstall)
        updates.watch(self)
        self._watch()

    # What a user asks --------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether the model still trains on TIDE's collectives."""
        return self._uninstall.alive

    @property
    def plan(self) -> Plan | None:
        """The plan in use, to report, draw and prove; None if every group runs stock."""
        return None if self.compiled is None else Plan(self.compiled, self.scope.rank, self._model, (), self.scope)

    @property
    def failure(self) -> str | None:
        """What has ended the step under way, if anything has."""
        return (None if self._session is None else self._session.transport.failure) or self._failure

    @property
    def groups(self) -> list[Any]:
        """FSDP2's parameter groups, those that run stock too."""
        return [reading.group for reading in self._readings]

    @property
    def transport(self) -> Transport | None:
        """What moves the bytes; None if every group runs stock, or after detach."""
        return None if self._session is None else self._session.transport

    def unit(self, name: str) -> AttachedUnit:
        """The attached group of that name."""
        return self._units[name]

    def detach(self) -> None:
        """Gives the model back to stock FSDP2; see :func:`detach`. Idempotent."""
        if not self.attached:
            return
        failure = None if self._session is None else self._session.transport.failure
        busy = any(introspect.is_busy(reading.wrapped.state) for reading in self._readings)
        if (failure := failure or (self._failure if busy else None)) is not None:
            self._give_up_step(failure)
        elif busy:
            raise AttachError(
                "a forward or backward pass is under way; detach between steps (after an exception in a step, "
                "reset_iter_state() of torch 2.13 and later ends it)"
            )
        for unit in self._units.values():
            unit.check_movable()
        self._unwatch()
        try:
            self._unbind()
        finally:
            self._uninstall()

    def _give_up_step(self, failure: str) -> None:
        """Ends the step in which a collective failed, as no later one can be run."""
        if torch._C._current_graph_task_id() != -1:
            raise AttachError(
                "detach is called while backward() runs, in a hook; autograd would go on with memory that is gone. "
                "Let the error end it, or wait until it returns, and detach then"
            )
        if self._session is not None:
            self._session.poison = False  # waits for peers
        recovery.give_up_step(introspect.wrapped_modules(self._model))
        logger.warning(
            "rank %d detaches after a failure and gives up the step: call optimizer.zero_grad() before the next one, "
            "and make sure that all ranks are at the same step; if one has died, save the shards and start again. %s",
            dist.get_rank(),
            failure,
        )

    def report(self) -> str:
        """What runs on TIDE, what runs stock and why, and what has been done so far."""
        served = [reading for reading in self._readings if reading.name in self._units]
        where = "" if self.scope.everywhere else f", {self.scope}"
        name = introspect.class_name(self._model) + ("" if self.attached else ", detached")
        lines = [f"{name}: {len(served)} of {len(self._readings)} groups on TIDE{where}"]
        if self._session is not None and self.compiled is not None:
            arena = self.compiled.arena
            lines[0] += (
                f", {versions.torch_name()}, transport {self._session.transport.name}, "
                f"{len(arena.slots)} slots, arena {arena.size / 2**20:.1f} MiB a rank, plan {self.compiled.digest[:12]}"
            )
            if self.compiled.topology.nodes > 1:
                rows = self._session.transport.describe()
                lines += [f"  {row}: {answer}" for row, answer in rows if row in ("network", "puts between nodes")]
            lines.append(f"  {self._session.transport.opened}")
        for reading in self._readings:
            name = reading.name or "root"
            if reading.reason is not None:
                lines.append(f"  {name}: stock FSDP2, since: {reading.reason}")
            elif self.compiled is not None and (unit := self._units.get(reading.name)):
                slot = self.compiled.arena.slot_of[reading.name]
                own = ", its own" if reading.unit is not None and reading.unit.stays_whole else ""
                lines.append(f"  {name}: slot {slot}{own}, {len(unit.params)} parameters; {unit.counts}{unit.remark}")
        if self.failure is not None:
            lines.append(f"  failed: {self.failure}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        state = f"{len(self._units)} of {len(self._readings)} groups" if self.attached else "detached"
        return f"<tide.Attachment {introspect.class_name(self._model)}: {state}>"

    def say_once(self, message: str) -> None:
        """Logs a message the first time it comes, on one rank, as all come to the same."""
        if message not in self._said:
            self._said.add(message)
            if self.scope.rank == 0:
                logger.warning(message)

    def failed(self, error: TideError) -> None:
        """Takes note of what ends a step on this rank: it can be detached in the middle of it then."""
        self._failure = f"{type(error).__name__}: {error}"

    def learn(self, clash: str, unit: AttachedUnit, holder: AttachedUnit) -> None:
        """Takes note of units that are whole at once with this one, so that the next step has room for all."""
        whole = [other for other in self._units.values() if other.whole and other is not unit]
        if self._fixed_slots or not introspect.is_in_pass(unit.group):  # unsharded by hand: may be once only
            needed = max(self.slots, sum(other.like(unit) for other in whole)) + 1
            remedy = f"tide.attach(model, slots={needed}) may avoid it"
        elif holder.ends_late:
            self._sticky.kept.add(holder.name)
            self._fingerprint = ()
            remedy = f"From the next step on {holder.name!r} has storage of its own"
        else:
            self._sticky.apart |= {(min(unit.name, other.name), max(unit.name, other.name)) for other in whole}
            self._fingerprint = ()
            remedy = "From the next step on they have different slots"
        self.say_once(f"{clash}: FSDP2 gathers it into memory of its own. {remedy}")

    # Binding -----------------------------------------------------------------------------------

    def _bind(self) -> None:
        """Reads the model, compiles, opens the transport and lays the parameters on its storage."""
        readings = read_groups(self._model, self.scope, self._sticky, why_not)
        if left := [reading for reading in readings if reading.reason is not None]:
            first = f"{left[0].name or 'root'!r}, since: {left[0].reason}"
            if self.strict:
                raise AttachError(f"a group has to run stock FSDP2: {first} (strict=True)")
            more = f"; {len(left) - 1} more, see attachment.report()" if len(left) > 1 else ""
            self.say_once(f"{len(left)} of {len(readings)} groups run stock FSDP2: {first}{more}")
        compiled = self._compile(readings)
        if compiled is None or self.compiled is None or compiled.digest != self.compiled.digest:
            units = {r.name: AttachedUnit(r.name, r.group, self) for r in readings if r.unit is not None}
            for unit in (*self._units.values(), *units.values()):
                unit.check_movable()
            self._fingerprint = ()  # if what follows fails, the next step tries again, and does not go on without
            self._unbind()
            if compiled is not None:
                self._open(compiled, units)
        else:
            agree_on(readings, self.scope)
        self._readings, self._fingerprint = readings, fingerprint(readings)

    def _compile(self, readings: list[Reading]) -> Compiled | None:
        units = tuple(reading.unit for reading in readings if reading.unit is not None)
        if not units:
            return None
        self.slots = self._fixed_slots or slots_for(readings)
        padded = any(r.unit is not None and introspect.reshards_smaller(r.group) for r in readings)
        options = replace(self._options, slots=self.slots, padded_storage=self._options.padded_storage or padded)
        skipped = tuple((name, r.reason) for r in readings if r.reason is not None for name in r.parameters)
        names = {unit.name for unit in units}
        apart = tuple(sorted(pair for pair in self._sticky.apart if names.issuperset(pair)))
        source = f"fully_shard-ed {introspect.class_name(self._model)}"
        spec = ModelSpec(units, source=source, skipped=skipped, apart=apart)
        compiled = compile_spec(spec, self._topology, options)
        verify(compiled, full=False)
        return compiled

    def _open(self, compiled: Compiled, units: dict[str, AttachedUnit]) -> None:
        device = next(iter(units.values())).group.device
        if callable(self._transport):
            transport = self._transport(compiled, self.scope.rank)
        else:
            name = {"cpu": "host"}.get(device.type, device.type) if self._transport == "auto" else self._transport
            transport = open_transport(name, compiled, self.scope.rank, **self.scope.settings())
        self.compiled, self._session = compiled, Session(compiled, transport, poison=self.debug)
        self._units, self.bindings = units, self.bindings + 1
        try:
            for unit in self._units.values():
                unit.reshard()
                unit.bind(self._session)
        except BaseException:
            self._unbind()
            raise

    def _unbind(self) -> None:
        for unit in self._units.values():
            unit.reshard()
            unit.unbind()
        devices = {unit.group.device.type for unit in self._units.values()}
        session, self._session, self.compiled, self._units = self._session, None, None, {}
        if session is None:
            return
        try:
            if devices - {"cpu"} and session.transport.failure is None:  # else it stays mapped, and not all would come
                # Peers' copies from this rank's memory are on their devices' streams, of which this one knows nothing.
                torch.accelerator.synchronize()
                self.scope.barrier()
        except PeerError as error:
            session.transport.fail(str(error))  # so that its memory stays mapped
            raise
        finally:
            session.close()

    # Watching for changes ----------------------------------------------------------------------

    def _watch(self) -> None:
        """Has every state ask, before a forward pass, whether the plan still fits the model."""
        this = weakref.ref(self)
        for wrapped in introspect.wrapped_modules(self._model):
            setattr(wrapped.state, _ATTACHMENT, self)
            wrapped.state._root_pre_forward = updates.before_forward(wrapped.state, this)

    def _unwatch(self) -> None:
        for wrapped in introspect.wrapped_modules(self._model):
            wrapped.state.__dict__.pop("_root_pre_forward", None)
            wrapped.state.__dict__.pop(_ATTACHMENT, None)

    def refresh(self) -> None:
        """Before a step: binds anew if the model was configured differently since; the same on all ranks."""
        self.steps += 1
        self._failure = None
        if self.early_reduce:
            early.settle(self, list(self._units.values()))
        if fingerprint(self._readings) != self._fingerprint:
            self._bind()
