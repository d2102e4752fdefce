"""The plan that a user holds: read it, prove it, run it. :mod:`tide.planning` makes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.options import PlanOptions
from tide.compiler.shard import shard_shape
from tide.compiler.steps import Program
from tide.compiler.verify import Proof, verify
from tide.errors import CapabilityError, InputError
from tide.plan_file import dump_plan
from tide.topology import Topology

if TYPE_CHECKING:
    import networkx as nx
    import torch

    from tide.compiler.model import ModelSpec, Parameter, Unit
    from tide.scope import Scope
    from tide.session import Session
    from tide.transport.simulated import Operation, Result


class Plan:
    """A compiled plan, held by one rank. Immutable; made by :func:`tide.compile_plan` or :func:`tide.load_plan`.

    Attributes
    ----------
    compiled : Compiled
        Layouts and programs of all ranks.
    rank : int
        The rank that holds it.
    remarks : tuple of str
        What was given up to fit a memory limit.
    scope : Scope or None
        Ranks of the running job that hold the model, whose places are the plan's ranks; None of a plan that was not
        made from a ``fully_shard``-ed model, whose ranks are those of the job.
    """

    __slots__ = ("__weakref__", "_agreed", "_model", "_opened", "_sessions", "compiled", "rank", "remarks", "scope")

    compiled: Compiled
    rank: int
    remarks: tuple[str, ...]
    scope: Scope | None
    _model: Any
    _sessions: dict[str, Session]
    _opened: dict[str, Any]
    _agreed: dict[str, str]

    def __init__(
        self,
        compiled: Compiled,
        rank: int,
        model: Any = None,
        remarks: Sequence[str] = (),
        scope: Scope | None = None,
    ) -> None:
        for name, value in (
            ("compiled", compiled),
            ("rank", rank),
            ("remarks", tuple(remarks)),
            ("scope", scope),
            ("_model", model),
            ("_sessions", {}),
            ("_opened", {}),
            ("_agreed", {}),
        ):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a plan is immutable; compile a new one instead of setting {name!r}")

    # Reading it ----------------------------------------------------------------------------------

    @property
    def spec(self) -> ModelSpec:
        """Units and parameters."""
        return self.compiled.spec

    @property
    def topology(self) -> Topology:
        """Ranks and nodes."""
        return self.compiled.topology

    @property
    def options(self) -> PlanOptions:
        """The choices made."""
        return self.compiled.options

    @property
    def units(self) -> tuple[Unit, ...]:
        """The parameters that travel together."""
        return self.spec.units

    @property
    def digest(self) -> str:
        """Hash of the plan; equal on all ranks, or the first collective raises."""
        return self.compiled.digest

    def program(self, unit: str, collective: str = "all_gather", rank: int | None = None) -> Program:
        """Steps of one rank (this one by default) for one collective of one unit."""
        return self.compiled.program(unit, collective, self.rank if rank is None else rank)

    def verify(self, *, ranks: Iterable[int] | None = None) -> Proof:
        """Proves the plan in full; see :func:`tide.compiler.verify.verify`.

        Raises
        ------
        PlanError
            Naming parameter, rank and byte range of the first thing that does not hold.
        """
        return verify(self.compiled, ranks=ranks)

    def simulate(
        self,
        sequence: Sequence[Operation] | None = None,
        *,
        seed: int = 0,
        family: str = "uniform",
        pieces: int = 3,
        payload: str = "normal",
        trace: bool = False,
    ) -> Result:
        """Runs the programs of all ranks in this process, on random bytes, in one legal interleaving.

        Every whole parameter that is used and every reduced shard is compared with a reference. It carries real
        bytes for all ranks: meant for small models, or a large one's :func:`tide.compiler.shapes.scaled` form.

        Parameters
        ----------
        sequence : sequence of Operation, optional
            What each rank issues, such as ``("all_gather", unit)``; see
            :meth:`tide.transport.simulated.Simulation.run`. By default one training step with prefetching.
        seed : int
            Decides the interleaving and the payload.
        family : str
            Seed family, one of :data:`tide.transport.simulated.FAMILIES`.
        pieces : int
            Parts into which a data step is cut, about.
        payload : str
            ``"normal"`` or ``"special"`` (with NaN, Inf and the like).
        trace : bool
            Keep the steps in logical time, for :func:`tide.transport.simulated.chrome_trace`.

        Returns
        -------
        Result
            Tensors that are gathered and reduced at the end, and the trace.

        Raises
        ------
        PlanError
            If a value, the order of accesses or the signals are not as the plan should make them.
        SlotError
            If the sequence asks a slot to hold two units at a time.
        """
        from tide.transport.simulated import Simulation, training_sequence

        simulation = Simulation(self.compiled, seed, family, pieces, payload, trace)
        return simulation.run(training_sequence(self.compiled) if sequence is None else sequence)

    def graph(self, unit: str | None = None, parameter: str | None = None) -> nx.MultiDiGraph:
        """Descriptor graph: shard nodes, storage nodes, an edge a descriptor.

        Parameters
        ----------
        unit, parameter : str, optional
            Restrict the graph; a whole large model has very many edges.
        """
        from tide.compiler.scatter import descriptor_graph

        return descriptor_graph(self.compiled, unit=unit, parameter=parameter)

    def report(self) -> Any:
        """What the plan does, unit by unit: a :class:`tide.report.PlanReport`; ``print`` it."""
        from tide.report import plan_report

        return plan_report(
            self.compiled, self.rank, self.remarks, [session.transport.opened for session in self._sessions.values()]
        )

    def to_json(self, path: str | Path | None = None) -> str:
        """The plan as JSON text, also written to ``path`` if given. :func:`tide.load_plan` reads it."""
        text = dump_plan(self.compiled, self.rank)
        if path is not None:
            Path(path).write_text(text)
        return text

    def __repr__(self) -> str:
        parameters = sum(len(unit.parameters) for unit in self.units)
        return (
            f"<tide.Plan {self.spec.source or 'model'}: {len(self.units)} units, {parameters} parameters, "
            f"{_gib(sum(unit.nbytes for unit in self.units))}; {self.topology}, rank {self.rank}; "
            f"{f'{self.scope}; ' if self.scope and not self.scope.everywhere else ''}"
            f"arena {_gib(self.compiled.arena.size)}; {self.digest[:12]}"
            f"{'; to fit: ' if self.remarks else ''}{'; '.join(self.remarks)}>"
        )

    def _repr_html_(self) -> str:
        html: str = self.report()._repr_html_()
        return html

    # Running it ----------------------------------------------------------------------------------

    def all_gather(
        self, unit: str | None = None, *, shards: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Makes parameters whole, each in its own storage. Collective over the plan's ranks.

        Parameters
        ----------
        unit : str, optional
            One unit; all units by default. With shared slots (``options.slots``) the whole model is gathered into an
            arena of its own, since it does not fit the slots.
        shards : mapping of str to Tensor, optional
            This rank's shard of each parameter; by default those of the model that the plan was compiled from.

        Returns
        -------
        dict of str to Tensor
            Views of the arena, of the parameter's shape and storage dtype. A unit's views hold until
            :meth:`release`, and after the next :meth:`all_gather` of the unit they show its new values.

        Raises
        ------
        SlotError
            If another unit that was not released holds the slot.
        InputError, CapabilityError, PeerError
            For missing or wrong shards, no process group, a peer that does not answer.
        """
        session = self._session(whole=unit is None)
        units = self.units if unit is None else (self.spec.unit(unit),)
        held = [found for found in units if found.mesh.locate(self.rank) is not None]
        given = self._shards(shards)
        for found in held:
            if missing := [p.name for p in found.parameters if p.name not in given]:
                raise InputError(f"all_gather: no shard for {', '.join(missing[:4])} of unit {found.name!r}")
            _, position = self.compiled.group(found.name, self.rank)
            for p in found.parameters:
                _check_tensor("all_gather: shard", p, given[p.name], shard_shape(p, found.mesh.size, position))
        out: dict[str, torch.Tensor] = {}
        for found in held:
            session.all_gather(found.name, [given[p.name] for p in found.parameters]).wait()
            out.update(session.whole(found.name))
        for found in held:
            for parameter in found.parameters:
                out.update({alias: out[parameter.name] for alias in parameter.aliases})
        return out

    def release(self, unit: str | None = None) -> None:
        """Gives the slot of a unit (of all units) back; views that :meth:`all_gather` returned end here."""
        for session in self._sessions.values():
            for found in self.units if unit is None else (self.spec.unit(unit),):
                session.release(found.name)

    def reduce_scatter(
        self,
        grads: Mapping[str, torch.Tensor],
        unit: str | None = None,
        *,
        divide: float | None = None,
    ) -> dict[str, torch.Tensor]:
        """Sums whole gradients over the shard group; each rank gets the shards it owns. Collective.

        The order of summation is fixed by the plan, in float32: rank by rank within a node, then node by node.

        Parameters
        ----------
        grads : mapping of str to Tensor
            Whole gradients by parameter name: bfloat16, float16 or float32, the same on every rank, contiguous or not.
        unit : str, optional
            One unit; by default all units, for which every trainable parameter must have a gradient.
        divide : float, optional
            The float32 sum is divided by it; by default by the number of shards, which gives the mean.

        Returns
        -------
        dict of str to Tensor
            New tensors of ``out_dtype``, shaped like this rank's shards.
        """
        units = self.units if unit is None else (self.spec.unit(unit),)
        held = [found for found in units if found.mesh.locate(self.rank) is not None]
        known = {p.name: p for found in held for p in found.parameters}
        for name, grad in grads.items():
            if name not in known:
                raise InputError(f"reduce_scatter: no parameter {name!r} in the units to reduce")
            _check_tensor("reduce_scatter: gradient", known[name], grad, known[name].shape)
        for found in held:
            if missing := [p.name for p in found.parameters if p.trainable and p.name not in grads]:
                raise InputError(
                    f"reduce_scatter: no gradient for {', '.join(missing[:4])} of unit {found.name!r}; pass zeros "
                    "for parameters that were not used"
                )
        session = self._session()
        self._agree_on_types(known, grads)
        out: dict[str, torch.Tensor] = {}
        for found in held:
            trainable = [i for i, p in enumerate(found.parameters) if p.trainable]
            if not trainable:
                continue
            chosen = {i: grads[found.parameters[i].name] for i in trainable}
            outs = session.new_outs(found.name, trainable, chosen[trainable[0]].device)
            divisor = float(found.mesh.size if divide is None else divide)
            session.reduce_scatter(found.name, chosen, outs, divisor=divisor).wait()
            out.update({found.parameters[i].name: outs[i] for i in trainable})
        return out

    def _agree_on_types(self, known: Mapping[str, Parameter], grads: Mapping[str, torch.Tensor]) -> None:
        """Gradients of other types than last time must be so on every rank; a rank alone with them gets an error.

        All ranks begin with the plan's types, and whenever one changes, all of them meet here, or that one waits in
        vain: so they have the same types as long as no error is raised.
        """
        types = {n: str(grad.dtype).removeprefix("torch.") for n, grad in grads.items() if known[n].trainable}
        changed = [name for name, dtype in types.items() if dtype != self._agreed.get(name, known[name].grad_dtype)]
        if not changed or self.topology.world_size == 1:
            return
        from tide.transport.agreement import agree, control_group, resolve_timeout

        timeout = resolve_timeout(self._opened.get("timeout"))
        group = self._opened.get("group")
        if group is None and self.scope is not None:
            group = self.scope.group(timeout)
        with control_group(group, timeout) as control:
            agree({f"gradient of {name}": types[name] for name in changed}, None, control, timeout, "gradient types")
        self._agreed.update({name: types[name] for name in changed})

    def open(self, transport: str = "auto", **settings: Any) -> Session:
        """Opens the plan's session on a transport; :meth:`all_gather` does it by itself when first called.

        Parameters
        ----------
        transport : str
            ``"host"`` (processes of one machine, CPU tensors), ``"cuda"`` (GPUs of one node), or ``"auto"``:
            ``"cuda"`` if the model is on a GPU, or without a model if there is one.
        **settings
            Passed to the transport, such as ``timeout`` in seconds, or ``group``, the process group of the plan's
            ranks where they are not all of the job's and the plan does not know them (it was loaded from a file).
        """
        wanted = {"transport": transport, **settings}
        if self._sessions and wanted != self._opened:
            raise InputError(f"open: the plan is open with {self._opened}; close() it before opening it with {wanted}")
        self._opened.clear()
        self._opened.update(wanted)
        return self._open("slots", self.compiled)

    def close(self) -> None:
        """Frees the arena and everything shared with the peers. Collective; idempotent."""
        while self._sessions:
            self._sessions.popitem()[1].close()

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _open(self, key: str, compiled: Compiled) -> Session:
        if key not in self._sessions:
            from tide.session import Session
            from tide.transport import open_transport

            settings = {"transport": "auto", **self._opened}
            if self.scope is not None and "group" not in settings:
                settings |= self.scope.settings()
            transport = settings.pop("transport")
            if transport == "auto":
                transport = "cuda" if self._on_gpu() else "host"
            self._sessions[key] = Session(compiled, open_transport(transport, compiled, self.rank, **settings))
        return self._sessions[key]

    def _session(self, whole: bool = False) -> Session:
        shared = any(len(slot.units) > 1 for slot in self.compiled.arena.slots)
        if not (whole and shared):
            return self._open("slots", self.compiled)
        own_slots = PlanOptions(**{**self.options.to_dict(), "slots": None})  # type: ignore[arg-type]
        return self._open("whole", compile_spec(self.spec, self.topology, own_slots))

    def _on_gpu(self) -> bool:
        if self._model is not None:
            parameter = next(iter(self._model.parameters()), None)
            return parameter is not None and parameter.device.type == "cuda"
        import torch

        return torch.cuda.is_available()

    def _shards(self, given: Mapping[str, torch.Tensor] | None) -> Mapping[str, torch.Tensor]:
        if given is not None:
            return given
        if self._model is None:
            raise InputError(
                "all_gather: the plan was not compiled from a sharded model, so pass shards={name: local shard}"
            )
        from tide.fsdp.introspect import local_shards

        shards: Mapping[str, torch.Tensor] = local_shards(self._model)
        if not shards:
            raise CapabilityError(
                "all_gather: the model is not sharded; call fully_shard on it before compile_plan, or pass "
                "shards={name: local shard}"
            )
        return shards


def _check_tensor(role: str, parameter: Parameter, tensor: Any, shape: tuple[int, ...]) -> None:
    """Refuses what is no dense tensor of that shape: other elements than meant would be taken without a word.

    Raises
    ------
    InputError
        With the parameter's name and both shapes.
    """
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        kind = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise InputError(f"{role} of {parameter.name} must be a dense tensor, got {kind}")
    if tuple(tensor.shape) != shape:
        whose = f"the parameter has {shape}"
        if shape != parameter.shape:
            whose = f"this rank's shard of {parameter.shape} has {shape}"
        raise InputError(f"{role} of {parameter.name} has shape {tuple(tensor.shape)}, but {whose}")
    if hasattr(tensor, "to_local"):
        raise InputError(f"{role} of {parameter.name} is a distributed tensor; pass what .to_local() returns")


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.2f} MiB"
