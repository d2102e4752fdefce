"""Which units go through the switch, who decides, and what refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tide
from ranks import run_ranks
from tide.compiler.compile import Compiled, compile_spec
from tide.compiler.model import Mesh, ModelSpec, Parameter, Unit
from tide.compiler.options import PlanOptions
from tide.compiler.schedule.routes import by_multicast, why_no_multicast
from tide.compiler.steps import Multicast
from tide.errors import CapabilityError, InputError
from tide.multicast import OFF, refusal, require
from tide.topology import PRESETS, Links, Topology
from tide.transport.cuda import multicast as cuda_multicast
from tide.transport.cuda.window import Window
from tide.transport.switch import settled


def one_unit(topology: Topology, options: PlanOptions, rows: int = 64, mesh: Mesh | None = None) -> Compiled:
    mesh = mesh or Mesh((tuple(range(topology.world_size)),))
    unit = Unit("u", (Parameter("w", (rows, 1024)), Parameter("v", (rows, 512))), mesh)
    return compile_spec(ModelSpec((unit,)), topology, options)


def gathers(compiled: Compiled) -> bool:
    found = [
        any(isinstance(step, Multicast) for _, _, step in compiled.program("u", "all_gather", rank).steps())
        for rank in range(compiled.topology.world_size)
    ]
    assert len(set(found)) == 1, "all ranks go the same way"
    assert found[0] == by_multicast(compiled.context("u", 0))
    return found[0]


ON, AUTO = PlanOptions(multicast="on"), PlanOptions(multicast="auto")


def test_options_are_checked() -> None:
    assert PlanOptions().multicast == "off"
    with pytest.raises(InputError, match="multicast must be one of off, on, auto, got True"):
        PlanOptions(multicast=True)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="multicast='on' needs route='push'"):
        PlanOptions(multicast="on", route="pull")
    with pytest.raises(InputError, match="multicast must be True or False"):
        Links(multicast=1)  # type: ignore[arg-type]


def test_on_goes_through_the_switch_wherever_it_can() -> None:
    assert gathers(one_unit(Topology(1, 2), ON))
    assert gathers(one_unit(Topology(2, 4), ON))
    assert not gathers(one_unit(Topology(4, 1), ON))
    assert not gathers(one_unit(Topology(1, 4), ON, mesh=Mesh(((0, 1), (2, 3)))))


def test_auto_takes_multicast_for_small_units_only() -> None:
    """A write at once saves copies; all ranks' bytes still come in through one port, its own included."""
    assert gathers(one_unit(Topology(1, 8), AUTO, rows=64))
    assert not gathers(one_unit(Topology(1, 8), AUTO, rows=1 << 16))
    reason = why_no_multicast(one_unit(Topology(1, 8), AUTO, rows=1 << 16).context("u", 0))
    assert reason is not None
    assert "predicted to take" in reason
    assert "7 pushes" in reason


def test_auto_pushes_between_two_ranks() -> None:
    for rows in (2, 64, 4096):
        assert not gathers(one_unit(Topology(1, 2), AUTO, rows=rows))


def test_auto_asks_the_topology() -> None:
    assert not gathers(one_unit(Topology(1, 8, links="host"), AUTO))
    assert not gathers(one_unit(Topology(1, 8, links=Links(multicast=False)), AUTO))
    assert {name: links.multicast for name, links in PRESETS.items()} == {"h200": True, "h100": True, "host": False}


def test_links_are_hashed_where_they_decide() -> None:
    slow = Topology(1, 8, links=Links(copy_engine=1e9))
    assert one_unit(Topology(1, 8), AUTO).digest != one_unit(slow, AUTO).digest
    assert one_unit(Topology(1, 8), ON).digest == one_unit(slow, ON).digest
    assert len({one_unit(Topology(1, 8), options).digest for options in (ON, AUTO, PlanOptions())}) == 3


def test_a_plan_file_keeps_the_choice() -> None:
    plan = tide.compile_plan({"w": ((64, 64), "float32")}, topology=Topology(1, 8), options=AUTO, rank=0)
    assert tide.load_plan(plan.to_json()).digest == plan.digest


def test_report_names_the_route_and_the_reason() -> None:
    shapes = {"w": ((64, 64), "float32")}
    text = str(tide.compile_plan(shapes, topology=Topology(1, 8), options=ON, rank=0).report())
    assert "multicast, multicast" in text
    assert "written once to the switch, for 8 ranks of one node" in text
    mesh = Mesh(((0, 1), (2, 3)))
    text = str(tide.compile_plan(shapes, topology=Topology(1, 4), options=ON, mesh=mesh, rank=0).report())
    assert "it reaches whole nodes" in text.replace("\n    ", " ")


def test_clock_charges_every_port_what_all_ranks_send() -> None:
    from tide.compiler.cost import predict

    links = Links(switch_latency=1e-6)
    compiled = one_unit(Topology(1, 4, links=links), ON, rows=1 << 12)
    spent = predict(compiled, "u", "all_gather", 0)
    (moved,) = {event.nbytes for event in spent.events if event.kind == "multicast"}
    assert spent.nvlink_bytes == moved
    assert spent.copy_seconds == pytest.approx(1e-6 + 2 * links.copy_latency + 4 * moved / links.copy_engine)


# Availability -------------------------------------------------------------------------------------


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in OFF:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("name", OFF)
def test_each_variable_refuses_by_name(name: str, allowed: pytest.MonkeyPatch) -> None:
    assert refusal() is None
    require("a test")
    value = OFF[name][0]
    allowed.setenv(name, value)
    assert refusal() == f"{name}={value} turns multicast off"
    with pytest.raises(CapabilityError, match=rf"^a test: {name}={value} turns multicast off"):
        require("a test")
    assert cuda_multicast.unavailable(Topology(1, 2)) == refusal()
    allowed.setenv(name, {"0": "1", "1": "0"}[value])
    assert refusal() is None


def test_multicast_pointer_is_not_asked_for_where_it_is_forbidden(allowed: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Library:
        def __call__(self, name: str, *arguments: object) -> None:
            calls.append(name)

    window = Window.__new__(Window)
    window.library, window.windows = Library(), [1]  # type: ignore[assignment]
    allowed.setenv("NCCL_NVLS_ENABLE", "0")
    with pytest.raises(CapabilityError, match="NCCL_NVLS_ENABLE=0"):
        window.multicast_address()
    assert calls == []
    allowed.delenv("NCCL_NVLS_ENABLE")
    with pytest.raises(CapabilityError, match="gives no multicast address"):
        window.multicast_address()
    assert calls == ["ncclGetLsaMultimemDevicePointer"]


def test_virtual_nodes_share_one_multicast_address(allowed: pytest.MonkeyPatch) -> None:
    reason = cuda_multicast.unavailable(Topology(2, 2, virtual=True))
    assert reason is not None
    assert "does not serve virtual nodes" in reason
    assert "virtual" not in (cuda_multicast.unavailable(Topology(2, 8)) or "")


def test_demand_is_what_the_plan_needs() -> None:
    assert cuda_multicast.demand(one_unit(Topology(1, 4), PlanOptions())) is None
    assert cuda_multicast.demand(one_unit(Topology(4, 1), ON)) is None
    assert cuda_multicast.demand(one_unit(Topology(1, 4), ON)) == "multicast='on'"
    needed = cuda_multicast.demand(one_unit(Topology(1, 8), AUTO))
    assert needed is not None
    assert "unit 'u'" in needed
    assert cuda_multicast.demand(one_unit(Topology(1, 8), AUTO, rows=1 << 16)) is None


def test_demand_of_sums_in_the_switch() -> None:
    def demand(topology: Topology, **options: str) -> str | None:
        return cuda_multicast.demand(one_unit(topology, PlanOptions(**options)))  # type: ignore[arg-type]

    assert demand(Topology(2, 2), switch_reduce="on") == "switch_reduce='on'"
    assert demand(Topology(1, 4), switch_reduce="on") is None
    needed = demand(Topology(8, 8), switch_reduce="auto")
    assert needed is not None
    assert "reduced through the switch" in needed
    assert demand(Topology(8, 8, links="host"), switch_reduce="auto") is None


def test_report_names_the_sums_in_the_switch_and_the_reason() -> None:
    shapes = {"w": ((640, 64), "float32")}

    def text(topology: Topology, **options: str) -> str:
        plan = tide.compile_plan(shapes, topology=topology, options=PlanOptions(**options), rank=0)  # type: ignore[arg-type]
        return " ".join(str(plan.report()).split())

    found = text(Topology(4, 2), switch_reduce="on")
    assert "push + put + switch" in found
    assert "summed in the switch, up to 2 at a time: 4 nodes" in found
    assert "spread area" in found
    found = text(Topology(4, 2, links="host"), switch_reduce="auto")
    assert "no sums in the switch: the topology's switch makes none" in found


def test_clock_runs_sums_in_the_switch() -> None:
    from tide.compiler.clock import clock

    for scope in ("rank", "node", "group"):
        compiled = one_unit(Topology(4, 2), PlanOptions(switch_reduce="on"))
        course = clock(compiled, "u", "reduce_scatter", 0, scope)
        assert course.assumed == 0, scope
        assert any(event.kind == "switch_reduce" for event in course.events[0])
        assert course.seconds > 0


def test_offline_plans_stay_auto() -> None:
    assert settled(AUTO, Topology(8, 8)) is AUTO
    assert settled(ON, Topology(1, 2)) is ON


def settle_on_ranks(rank: int, world: int, able: tuple[int, ...]) -> tuple[str, str, str]:
    from tide.transport import switch

    if able:
        switch._unavailable = lambda topology: None if rank in able else "no switch here"  # type: ignore[assignment]
    both = replace(AUTO, switch_reduce="auto")
    here, elsewhere = settled(both, Topology(1, world)), settled(both, Topology(8, 8))
    assert here.switch_reduce == here.multicast, f"{here.switch_reduce} beside {here.multicast}"
    torch.manual_seed(0)
    plan = tide.compile_plan({"w": ((64, 64), "float32")}, topology=Topology(1, world), options=AUTO)
    return here.multicast, elsewhere.multicast, plan.digest


@pytest.mark.parametrize("able", [(), (0,), (0, 1)])
def test_ranks_of_a_job_agree(able: tuple[int, ...]) -> None:
    """On CPUs there is none; one rank without is enough; a plan for another machine asks nobody."""
    found = run_ranks(settle_on_ranks, 2, able)
    assert found[0] == found[1]
    assert found[0][:2] == ("auto" if len(able) == 2 else "off", "auto")
    offline = tide.compile_plan(
        {"w": ((64, 64), "float32")}, topology=Topology(1, 2), options=replace(AUTO, multicast=found[0][0]), rank=0
    )
    assert found[0][2] == offline.digest
