"""Early reduction: gradients that a unit's backward pass makes first are reduced while it computes the rest.

Stock FSDP2 reduces a unit when its backward pass has ended. Behind the last unit nothing is left to compute, so
its reduction is exposed. Here it is done in two parts::

    backward of a block   down │ gate │ up │ attention …………………… q k v │
    reduce-scatter                         └ early part ─────┘        └ rest ┘

Which gradients come first is noted in a backward pass; the ranks compare what they saw before the next forward
pass, and from then on a hook on the last parameter of the early part starts it. The early part's result is used
only if, at the end of the unit's backward pass, its gradients are still what was reduced. Otherwise, or if the
early part did not begin as it should have, the ranks tell each other so, all gradients are reduced as without it,
and the unit has no early part any more.

A rank that alone comes to that waits for the others, which wait for its part of the rest: deadlines end the step
and name the unit. Nothing short of a message in every step could tell earlier that ranks run different graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tide.errors import PeerError
from tide.fsdp import introspect, streams
from tide.transport.agreement import control_group, exchange, resolve_timeout

if TYPE_CHECKING:
    from tide.fsdp.attachment import Attachment
    from tide.fsdp.unit import AttachedUnit
    from tide.transport.base import Ticket

#: Share of a unit's gradient bytes that its early part has at least, where something remains then.
SHARE = 0.75
#: Bytes of a rank's shards from which on an early part is worth a program of its own.
LEAST_BYTES = 8 * 2**20

#: Why an early part did not begin, where its hook does not say more.
_MISSED = "gradients come in another order than before"


@dataclass(frozen=True, slots=True)
class Choice:
    """What a unit reduces early.

    Attributes
    ----------
    early : tuple of int
        Parameter indices, in the order in which their gradients come; the last one starts the reduction.
    every : tuple of int
        Indices of all gradients that the unit reduces, in FSDP2's order.
    """

    early: tuple[int, ...]
    every: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Terms:
    """How the unit's gradients were reduced the last time, which FSDP2 says only at the end of backward.

    Attributes
    ----------
    settings : tuple
        Of the group, from which FSDP2 derives the rest.
    stream : Stream
        The one that FSDP2 reduces on.
    numel, dtype, device
        Of the flat output.
    scale, divisor : float
        Of the sums.
    """

    settings: tuple[Any, ...]
    stream: Any
    numel: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    divisor: float

    @classmethod
    def of(cls, group: Any, stream: Any, output: torch.Tensor, scale: float, divisor: float) -> Terms:
        """Those of the reduction that a stream is given."""
        settings = introspect.reduce_settings(group)
        return cls(settings, stream, output.numel(), output.dtype, output.device, scale, divisor)


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """An early part under way.

    Attributes
    ----------
    given : dict of int to Tensor
        Gradients as FSDP2 will give them, by parameter index.
    marks : dict of int to tuple
        What changes with their values.
    sent : dict of int to Tensor
        What is reduced: the gradients, or copies of them.
    output : Tensor
        Flat, with room for the rest.
    terms : Terms
        As used.
    ticket : Ticket
        The collective.
    """

    given: dict[int, torch.Tensor]
    marks: dict[int, tuple[Any, ...]]
    sent: dict[int, torch.Tensor]
    output: torch.Tensor
    terms: Terms
    ticket: Ticket


def choose(order: Sequence[int], nbytes: Sequence[int]) -> tuple[int, ...]:
    """The early part: what comes first, up to `SHARE` of the bytes, or all but what comes last.

    Parameters
    ----------
    order : sequence of int
        Parameter indices in the order in which their gradients come.
    nbytes : sequence of int
        Bytes of a rank's shard of each parameter's gradient.

    Returns
    -------
    tuple of int
        Empty where it would have fewer than `LEAST_BYTES`, or where there is one gradient only.
    """
    sums = list(accumulate(nbytes[index] for index in order))
    enough = next((count for count, found in enumerate(sums, 1) if found >= SHARE * sums[-1]), 0)
    count = min(enough, len(order) - 1)
    return tuple(order[:count]) if count > 0 and sums[count - 1] >= LEAST_BYTES else ()


def settle(attachment: Attachment, units: Sequence[AttachedUnit]) -> None:
    """Compares what the ranks have learned since the last time. Collective, if there is anything.

    Every rank has: a unit learns when it is reduced, which is collective itself.
    """
    learned = {unit.name: unit.early.learned for unit in units if unit.early is not None and unit.early.learned}
    if not learned:
        return
    timeout = resolve_timeout()
    with control_group(attachment.scope.group(timeout), timeout) as control:
        answers = exchange(learned, control, timeout, "early parts")
    for unit in units:
        if unit.early is None or unit.name not in learned:
            continue
        own = learned[unit.name]
        if all(answer.get(unit.name) == own for answer in answers):
            unit.early.settle(own)
        else:
            reason = "the ranks' gradients come in different orders"
            attachment.say_once(f"unit {unit.name!r} has no early part, since {reason}")
            unit.early.settle(reason)


class EarlyReduction:
    """The early part of one unit: learned, settled among the ranks, and carried out from then on.

    Parameters
    ----------
    unit : AttachedUnit
        Bound.
    """

    def __init__(self, unit: AttachedUnit) -> None:
        self.unit = unit
        #: What this rank would reduce early, or why nothing; until the ranks have compared it.
        self.learned: Choice | str | None = None
        self.choice: Choice | None = None
        self.reason = "not learned yet"
        self._learning = True
        #: Whether hooks were there when the unit's forward pass ran, so that the early part must begin in backward.
        self._armed = False
        self._accumulates = False
        #: Why the early part did not begin.
        self._missed = _MISSED
        self._terms: Terms | None = None
        self._order: list[int] = []
        self._streams: list[Any] = []
        self._part: Part | None = None
        self._hooks: list[Any] = []
        self._leaf: torch.Tensor | None = None
        if introspect.is_offloaded(unit.group):
            self._stop("its parameters are offloaded to the CPU")
        elif introspect.is_compiled(unit.group):
            self._stop("its module is compiled as one, whose gradients come all at once")
        elif (known := unit.attachment.early_parts.pop(unit.name, None)) is not None:
            parameters, choice, terms = known
            if parameters == unit.spec.parameters:  # else learned anew, on every rank
                self._learning, self.choice, self._terms = False, choice, terms

    @property
    def remark(self) -> str:
        """For the report."""
        if self.choice is not None:
            return f"; {len(self.choice.early)} of {len(self.choice.every)} gradients early"
        return f"; no early part, since {self.reason}"

    def close(self) -> None:
        """Takes the hooks away; what was settled stays for the unit that takes this one's place, if it is alike."""
        if self.choice is not None and self._terms is not None:
            self.unit.attachment.early_parts[self.unit.name] = self.unit.spec.parameters, self.choice, self._terms
        self._stop("detached")
        with suppress(PeerError):
            self._drop()

    def _stop(self, reason: str) -> None:
        self._learning, self.choice, self.learned, self.reason = False, None, None, reason
        self._armed = False
        self._unhook()

    def _unhook(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks, self._leaf = [], None

    # Learning ----------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Puts hooks on the whole parameters, which FSDP2 makes at the first forward pass and keeps."""
        if self.choice is not None:
            watched = self.choice.early[-1:]
        elif self._learning:
            watched = tuple(range(len(self.unit.params)))
        else:
            return
        self._order.clear()  # of a backward pass that an exception has ended
        leaves = [(index, self.unit.params[index]._unsharded_param) for index in watched]
        if leaves[0][1] is self._leaf and self._hooks:
            return
        self._unhook()
        self._leaf = leaves[0][1]
        for index, leaf in leaves:
            if leaf.requires_grad:
                self._hooks.append(leaf.register_post_accumulate_grad_hook(self._hook(index)))
        self._armed = self.choice is not None

    def _hook(self, index: int) -> Any:
        if self.choice is not None:
            return _calling(self, EarlyReduction._start)
        return _calling(self, partial(EarlyReduction._note, index=index))

    def _note(self, leaf: torch.Tensor, index: int) -> None:
        """A gradient has come, while their order is being learned."""
        if self._learning and introspect.reduces_now(self.unit.group):
            self._order.append(index)
            self._accumulates = self._accumulates or introspect.has_accumulated(self.unit.group)
            stream = self.unit.group.device_handle.current_stream()
            if stream not in self._streams:
                self._streams.append(stream)

    def learn(self, terms: Terms, every: tuple[int, ...]) -> None:
        """Takes note of a reduction that has been carried out.

        Parameters
        ----------
        terms : Terms
            How.
        every : tuple of int
            Indices of all gradients that were reduced, in FSDP2's order.
        """
        if self.choice is not None:
            if every == self.choice.every:
                self._terms = terms
            return
        if not self._learning or not self._hooks:  # as on every rank, whatever gradients came here
            return
        self._learning, self._terms = False, terms
        self.learned = self._chosen(every)
        self._unhook()

    def _chosen(self, every: tuple[int, ...]) -> Choice | str:
        order, self._order = self._order, []
        streams, self._streams = self._streams, []
        if len(set(order)) < len(order) or not set(order) <= set(every):
            return "gradients come more than once in a backward pass"
        if len(streams) > 1:
            return "its gradients come on several streams"
        if self._accumulates:
            return "its gradients are accumulated over several backward passes in another type than they are made in"
        if any(introspect.is_distributed(self.unit.params[index]) for index in every):
            return "its gradients are distributed tensors"
        early = choose(order, self.unit.flat.gradient_bytes)
        return Choice(early, every) if early else "too little of it would be early"

    def settle(self, agreed: Choice | str) -> None:
        """Takes what all ranks have learned; hooks follow in the forward pass that begins."""
        self.learned = None
        if isinstance(agreed, Choice):
            self.choice = agreed
        else:
            self._stop(agreed)

    # Reducing ----------------------------------------------------------------------------------

    def _start(self, leaf: torch.Tensor) -> None:
        """The last gradient of the early part is there."""
        self._drop()  # of a backward pass that an exception has ended
        unit, choice, terms = self.unit, self.choice, self._terms
        if choice is None or terms is None or not unit.reduces or not introspect.reduces_now(unit.group):
            return
        given: dict[int, torch.Tensor] = {}
        for index in choice.early:
            grad = unit.params[index]._unsharded_param.grad
            if grad is None or type(grad) is not torch.Tensor:
                self._missed = _MISSED
                return
            given[index] = grad
        if introspect.has_accumulated(unit.group):
            self._missed = "gradients of earlier backward passes are there"
            return
        if terms.settings != introspect.reduce_settings(unit.group):
            self._missed = "its gradients are divided by another factor, or reduced in another type, than before"
            return
        current = unit.group.device_handle.current_stream()
        with torch.no_grad(), streams.on(unit.group.device_handle, terms.stream):
            terms.stream.wait_stream(current)
            output = unit.flat.new(choice.every, terms.numel, terms.dtype, terms.device)
            sent, outs = unit.flat.lay_out(choice.every, [given.get(index) for index in choice.every], output)
            ticket = unit.session.reduce_scatter(unit.name, sent, outs, terms.scale, terms.divisor)
        marks = {index: _mark(grad) for index, grad in given.items()}
        self._part = Part(given, marks, sent, output, terms, ticket)

    def take(self, grads: Sequence[tuple[int, torch.Tensor]]) -> Part | None:
        """The early part, if these are the gradients that it was begun for. May be collective over all ranks.

        Parameters
        ----------
        grads : sequence of (int, Tensor)
            All gradients that FSDP2 now reduces.
        """
        part, self._part = self._part, None
        if self.choice is None or not self._armed:
            return None
        found = dict(grads)
        if tuple(found) != self.choice.every:
            reason = "other parameters have gradients than before"
        elif part is None:
            reason = self._missed
        elif any(found[index] is not grad or _mark(grad) != part.marks[index] for index, grad in part.given.items()):
            reason = "a gradient was changed after it had been accumulated"
        else:
            return part
        self.give_up(part, reason)
        return None

    def give_up(self, part: Part | None, reason: str) -> None:
        """Does without an early part from now on. Collective over the model's ranks, which must come to the same.

        Raises
        ------
        PeerError
            If the others do not come within the deadline.
        """
        unit = self.unit
        if part is not None:
            self._discard(part)
        timeout = resolve_timeout()
        try:
            with control_group(unit.attachment.scope.group(timeout), timeout) as control:
                exchange(reason, control, timeout, "early parts")
        except PeerError as error:
            message = (
                f"unit {unit.name!r} can have no early part on rank {dist.get_rank()}, since {reason}, and other "
                "ranks do not come to the same. Every rank must run the same graph for early_reduce=True; attach "
                "without it"
            )
            unit.session.transport.fail(message)  # they wait for a collective that this rank will not issue
            raise PeerError(message) from error
        self._stop(reason)
        unit.attachment.say_once(f"unit {unit.name!r} has no early part any more, since {reason}")

    def _discard(self, part: Part) -> None:
        """Lets an early part end for nothing."""
        self.unit.counts.dropped += 1
        with streams.on(self.unit.group.device_handle, part.terms.stream):  # to which the output's memory belongs
            part.ticket.wait()

    def _drop(self) -> None:
        part, self._part = self._part, None
        if part is not None:
            self._discard(part)


def _calling(
    reduction: EarlyReduction, method: Callable[[EarlyReduction, torch.Tensor], None]
) -> Callable[[torch.Tensor], None]:
    """A hook that does not keep the reduction alive, nor with it the model: torch keeps it where no cycle is found."""
    this = weakref.ref(reduction)

    def hook(leaf: torch.Tensor) -> None:
        if (found := this()) is not None:
            method(found, leaf)

    return hook


def _mark(grad: torch.Tensor) -> tuple[Any, ...]:
    """What changes when a gradient is written to, or given other memory; not what is written through ``.data``."""
    return grad._version, grad.data_ptr(), grad.dtype, grad.shape, grad.stride()
