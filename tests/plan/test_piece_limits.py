"""How a shard is cut into pieces: as many as pay, each as large as keeps pushes going."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tide
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.compiler.schedule.pieces import CAST_SPEED, own_pieces, piece_limits
from tide.compiler.steps import Place


@given(nbytes=st.integers(0, 1 << 34), peers=st.integers(0, 7), least=st.integers(512, 1 << 26))
def test_limits(nbytes: int, peers: int, least: int) -> None:
    limits = piece_limits(nbytes, peers, least)
    assert nbytes <= sum(limits) <= nbytes + len(limits)
    assert len(limits) == 1 or limits[0] >= least
    growth = Fraction(*CAST_SPEED) * max(peers, 1)
    # One more piece would have made the first too small.
    assert nbytes < least * sum(growth**k for k in range(len(limits) + 1))
    for before, after in itertools.pairwise(limits):
        assert abs(after - growth * before) <= growth + 1  # the next is cast by the time that this one is pushed


@pytest.mark.parametrize("ranks", [2, 4])
def test_pieces_of_a_unit(ranks: int) -> None:
    """No piece more than foreseen, though cuts fall between elements and runs."""
    parameters = tuple(Parameter(f"w{i}", (1000 + 37 * i, 77)) for i in range(9))
    spec = ModelSpec((Unit("block", parameters, Mesh((tuple(range(ranks)),))),))
    plan = tide.compile_plan(spec, topology=tide.Topology(1, ranks), options=PlanOptions(piece_bytes=4096))
    context = plan.compiled.context("block", 0)
    pieces = own_pieces(context, 0)
    nbytes = sum(t.nbytes for piece in pieces for t in piece.transfers)
    assert len(pieces) == len(piece_limits(nbytes, ranks - 1, 4096)) > 1
    program = plan.compiled.program("block", "all_gather", 0)
    assert sum(isinstance(step, Place) for _, _, step in program.steps()) >= len(pieces)
