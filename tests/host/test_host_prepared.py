"""Programs of ever other subsets of the gradients: what is kept of them is bounded, and what comes again is right."""

from __future__ import annotations

import random

import torch
from host_cases import Case, P

from tide.compiler.compile import SUBSETS
from tide.compiler.options import PlanOptions
from tide.session import Session
from tide.topology import Topology
from tide.transport.host import HostTransport

COUNT = 12


def test_programs_of_subsets_are_given_up_in_turn() -> None:
    rows = tuple(P(f"w{index}", (3, 5 + index)) for index in range(COUNT))
    compiled = Case((("all", rows),), PlanOptions()).compile(Topology(1, 1))
    session = Session(compiled, transport := HostTransport.open(compiled))
    chooser, met = random.Random(0), set()
    grads = [torch.randn(row.shape, generator=torch.Generator().manual_seed(i)) for i, row in enumerate(rows)]
    half = [grad.to(torch.bfloat16) for grad in grads]
    everything = compiled.program("all", "reduce_scatter", 0)
    sizes = []
    for step in range(300):
        subset = tuple(sorted(chooser.sample(range(COUNT), chooser.randint(1, COUNT - 1))))
        met.add(subset)
        given = {index: grads[index] if step % 3 == 0 else half[index] for index in subset}
        outs = session.new_outs("all", subset, "cpu")
        session.reduce_scatter("all", given, outs).wait()
        for index in subset:
            assert torch.equal(outs[index], given[index].float())
        sizes.append((len(compiled._partial), len(transport._prepared)))
    assert len(met) > 2 * SUBSETS
    assert max(sizes) == sizes[-1] == (SUBSETS, transport.most_prepared)
    assert compiled.program("all", "reduce_scatter", 0) is everything
    session.close()
