"""Errors that TIDE raises; each message names the thing that is wrong and what to do about it."""

from __future__ import annotations


class TideError(Exception):
    """Base of every error that TIDE raises on purpose."""


class InputError(TideError, ValueError):
    """A model, parameter, gradient, topology or option that TIDE cannot take as given."""


class PlanError(TideError):
    """A plan that does not prove: coverage, ownership, bounds, ordering or matching of waits."""


class MemoryLimitError(TideError):
    """A memory limit that no options of a plan fit into; the message names the smallest that they do."""


class SlotError(TideError):
    """A slot that is asked to hold two units at the same time."""


class CapabilityError(TideError):
    """Something this machine, its environment or an installed version does not offer."""


class TransportError(TideError):
    """A failure while a plan is carried out; the other ranks may still be running."""


class PeerError(TransportError):
    """A peer that died, did not answer within the deadline, or holds a different plan."""


class AttachError(TideError):
    """A model or group that ``tide.attach`` cannot serve."""
