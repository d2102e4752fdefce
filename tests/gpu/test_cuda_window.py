"""NCCL's window and communicators, without a GPU: set-up in step, refusals that name the rank, and loading."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tide
from ranks import run_ranks
from tide import nccl_library
from tide.errors import CapabilityError, InputError, PeerError, TransportError
from tide.multicast import OFF
from tide.transport.cuda import arena as arena_module
from tide.transport.cuda import nccl
from tide.transport.cuda.arena import Arena, Request, open_arena
from tide.transport.cuda.window import WireNeeds

NEEDS = WireNeeds(contexts=4, signals=6, communicators=2)


class FakeLibrary:
    """Set-up calls of NCCL on one rank; everything works unless told otherwise."""

    origin = "a test"

    def __init__(
        self,
        version: int = 23203,
        rma: bool = True,
        window: bool = True,
        fails: str = "",
        hangs: str = "",
        teams: int = 1,
        switch: bool = True,
    ) -> None:
        self.version, self.rma, self.window, self.fails, self.hangs = version, rma, window, fails, hangs
        self.teams, self.switch = teams, switch
        self.calls: list[str] = []
        self.configs: list[nccl.Config] = []

    @property
    def version_text(self) -> str:
        return nccl_library.version_text(self.version)

    def missing(self) -> list[str]:
        return []

    def unique_id(self) -> bytes:
        return bytes(128)

    def function(self, name: str) -> Any:
        return lambda *arguments: self.calls.append(name) or 0

    def __call__(self, name: str, *arguments: Any) -> None:
        self.calls.append(name)
        if name == self.hangs:
            time.sleep(3600)
        if name == self.fails:
            raise TransportError(f"{name}: made to fail (2)")
        if name in ("ncclMemAlloc", "ncclCommInitRankConfig"):
            arguments[0]._obj.value = 4096 * len(self.calls)
        if name == "ncclCommInitRankConfig":
            self.configs.append(nccl.Config.from_buffer_copy(arguments[4]._obj))
        if name == "ncclCommQueryProperties":
            arguments[1]._obj.hostRmaSupport = self.rma
            arguments[1]._obj.nLsaTeams = self.teams
        if name == "ncclCommWindowRegister":
            arguments[3]._obj.value = 77 if self.window else None
        if name == "ncclGetPeerDevicePointer":
            arguments[3]._obj.value = 1 << 20 | arguments[2]
        if name == "ncclGetLsaMultimemDevicePointer" and self.switch:
            arguments[2]._obj.value = 1 << 40


def opens(
    rank: int,
    world: int,
    behaviour: dict[int, dict[str, Any]],
    required: bool,
    needs: WireNeeds | None,
    timeout: float = 20.0,
    nodes: int = 0,
) -> tuple[str, Any]:
    """What a rank gets: the notes and calls, or the error's text and the calls; another provider is torch's."""
    if nodes:
        for name in OFF:  # the library is a fake: no multicast object is made
            os.environ.pop(name, None)
    library: Any = FakeLibrary(**behaviour.get(rank, {}))
    nccl._loaded = library
    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment, misc]
    arena_module._probe_torch = lambda device, multicast: "no multicast" if multicast else None
    arena_module._open_torch = lambda *a: Arena("stand-in", {0: 0}, None, lambda: None)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tide").addHandler(handler)
    group = torch.distributed.group.WORLD
    try:
        request = Request(range(rank + 1), needs, required, nodes)
        arena = open_arena(4096, rank, torch.device("cpu"), group, group, timeout, None, request)
    except (CapabilityError, PeerError) as error:
        return type(error).__name__, {"error": str(error), "calls": list(library.calls)} if nodes else str(error)
    arena.close()
    configs = [(c.size, c.version, c.numRmaCtx, c.numRmaSig, c.CTAPolicy) for c in library.configs]
    return arena.provider, {
        "notes": dict(arena.notes),
        "calls": list(library.calls),
        "configs": configs,
        "said": records,
        "window": arena.window is not None,
        "addresses": dict(arena.addresses),
        "multicast": arena.multicast,
    }


def test_window_for_puts() -> None:
    for rank, (provider, found) in enumerate(run_ranks(opens, 2, {}, True, NEEDS)):
        assert provider == "NCCL window"
        assert found["window"]
        # Only what is reachable, and the own memory as it was registered.
        assert found["addresses"] == ({0: 4096} if rank == 0 else {0: 1 << 20, 1: 4096})
        assert found["configs"] == [(120, 23203, 4, 6, nccl.UNSET)] * 2
        assert found["calls"].count("ncclMemAlloc") == 1
        assert found["calls"].count("ncclCommWindowRegister") == 2
        assert found["calls"][-4:] == ["ncclCommWindowDeregister"] * 2 + ["ncclCommDestroy"] * 2
        assert found["notes"]["puts between nodes"] == "NCCL"
        assert "2, each with 4 contexts and 6 signals" in found["notes"]["NCCL communicators"]
        assert not found["said"]


def test_window_without_puts() -> None:
    provider, found = run_ranks(opens, 2, {}, False, None)[0]
    assert provider == "NCCL window"
    assert not found["window"]
    assert found["configs"] == [(120, 23203, nccl.UNSET, nccl.UNSET, nccl.UNSET)]
    assert "ncclCommQueryProperties" not in found["calls"]


REASONS: dict[str, tuple[dict[int, dict[str, Any]], str]] = {
    "too old everywhere": ({0: {"version": 22809}, 1: {"version": 22809}}, "NCCL 2.28.9 (a test) is too old"),
    "too old on one rank": ({1: {"version": 22907}}, "NCCL 2.29.7 (a test) is too old (rank 1)"),
    "no host RMA": ({1: {"rma": False}}, "(hostRmaSupport is false)"),
    "no window": ({0: {"window": False}, 1: {"window": False}}, "NCCL gave no window"),
    "init fails": ({1: {"fails": "ncclCommInitRankConfig"}}, "ncclCommInitRankConfig: made to fail (2) (rank 1)"),
    "memory fails": ({0: {"fails": "ncclMemAlloc"}}, "ncclMemAlloc: made to fail (2) (rank 0)"),
    "different versions": ({1: {"version": 23102}}, "NCCL: 2.32.3 on rank 0; 2.31.2 on rank 1"),
}


@pytest.mark.parametrize("case", REASONS)
def test_any_ranks_failure_is_every_ranks_error(case: str) -> None:
    behaviour, reason = REASONS[case]
    for kind, message in run_ranks(opens, 2, behaviour, True, NEEDS):
        assert kind == "CapabilityError"
        assert reason in message
        assert "the plan has steps between nodes, but" in message
        assert "pip install --no-deps --target DIR --upgrade nvidia-nccl-cu" in message
        assert "TIDE_NCCL_LIBRARY=DIR" in message


def test_a_set_up_that_does_not_end_is_told() -> None:
    behaviour = {1: {"hangs": "ncclCommWindowRegister"}}
    for kind, message in run_ranks(opens, 2, behaviour, True, NEEDS, 3.0):
        assert kind == "CapabilityError"
        assert "NCCL's window 0 was not ready within 3 s (rank 1)" in message


@pytest.mark.parametrize("case", REASONS)
def test_virtual_nodes_fall_back_and_say_so_once(case: str) -> None:
    behaviour, reason = REASONS[case]
    found = run_ranks(opens, 2, behaviour, False, NEEDS)
    assert len({provider for provider, _ in found}) == 1
    for rank, (_, got) in enumerate(found):
        assert not got["window"]
        assert reason in got["notes"]["puts between nodes"]
        assert len(got["said"]) == (1 if rank == 0 else 0)
    (said,) = found[0][1]["said"]
    assert "steps between virtual nodes run as copies" in said
    assert reason in said


@pytest.mark.parametrize(
    ("nodes", "teams", "needs"),
    [(1, (1, 1), None), (2, (2, 2), NEEDS), (2, (1, 1), NEEDS), (1, (2, 2), None), (2, (2, 1), NEEDS)],
    ids=["one", "two", "domain of two nodes", "node of two domains", "ranks differ"],
)
def test_multicast_addresses_are_of_domains_that_are_nodes(
    nodes: int, teams: tuple[int, int], needs: WireNeeds | None
) -> None:
    """NCCL is asked for the address on every rank, or on none."""
    behaviour = {rank: {"teams": count} for rank, count in enumerate(teams)}
    for provider, found in run_ranks(opens, 2, behaviour, True, needs, 20.0, nodes):
        if teams == (nodes, nodes):
            assert provider == "NCCL window"
            assert found["multicast"] == 1 << 40
            continue
        assert provider == "CapabilityError"
        assert "ncclGetLsaMultimemDevicePointer" not in found["calls"]
        said = f"NCCL sees {teams[0]} NVLink domain(s) where the plan has {nodes} node(s)"
        assert (said if teams[0] == teams[1] else "LSA teams: 2 on rank 0; 1 on rank 1") in found["error"]


def test_a_switch_without_multicast_is_every_ranks_error() -> None:
    for kind, found in run_ranks(opens, 2, {1: {"switch": False}}, True, NEEDS, 20.0, 1):
        assert kind == "CapabilityError"
        assert "the ranks' GPUs have no NVSwitch with NVLS (rank 1)" in found["error"]


# Loading ------------------------------------------------------------------------------------------

SOURCE = "int ncclGetVersion(int* v) { *v = VERSION; return 0; }\n"


@pytest.fixture
def libraries(tmp_path: Path) -> dict[int, Path]:
    """Shared objects that say they are NCCL, one folder each, as ``pip install --target`` lays them out."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    made = {}
    for version in (22809, 23102, 23203):
        folder = tmp_path / str(version) / "nvidia" / "nccl" / "lib"
        folder.mkdir(parents=True)
        (tmp_path / "nccl.c").write_text(SOURCE.replace("VERSION", str(version)))
        target = folder / "libnccl.so.2"
        command = [
            compiler,
            "-shared",
            "-fPIC",
            "-Wl,-soname,libnccl.so.2",
            "-o",
            str(target),
            str(tmp_path / "nccl.c"),
        ]
        subprocess.run(command, check=True)
        made[version] = target
    return made


def found_in_new_process(code: str, **environment: str) -> str:
    root = Path(__file__).resolve().parents[2]
    clean = {k: v for k, v in os.environ.items() if k not in ("TIDE_NCCL_LIBRARY", "LD_PRELOAD")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, env={**clean, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SHOW = """
import ctypes, sys
from tide import nccl_library
library, origin = nccl_library.load()
print(nccl_library.version_of(library), "|", origin)
"""


def test_the_environment_names_a_file_or_a_folder(libraries: dict[int, Path]) -> None:
    for path in (libraries[23203], libraries[23203].parent, libraries[23203].parents[3]):
        assert found_in_new_process(SHOW, TIDE_NCCL_LIBRARY=str(path)) == "23203 | TIDE_NCCL_LIBRARY"


def test_a_private_copy_beside_an_older_one(libraries: dict[int, Path]) -> None:
    """Both live in one process under one SONAME, whichever comes first; each answers for itself."""
    before = f"import ctypes, os\nold = ctypes.CDLL({str(libraries[22809])!r}, os.RTLD_GLOBAL)\n"
    after = "v = ctypes.c_int(); old.ncclGetVersion(ctypes.byref(v)); print(v.value)"
    both = found_in_new_process(before + SHOW + after, TIDE_NCCL_LIBRARY=str(libraries[23203]))
    assert both.split("\n") == ["23203 | TIDE_NCCL_LIBRARY", "22809"]


def test_preloaded_or_loaded_before_is_used(libraries: dict[int, Path]) -> None:
    assert found_in_new_process(SHOW, LD_PRELOAD=str(libraries[23203])) == "23203 | loaded before"
    assert found_in_new_process(SHOW, LD_PRELOAD=str(libraries[22809])) == "22809 | loaded before"


def test_a_newer_wheel_is_used_beside_an_older_library(libraries: dict[int, Path]) -> None:
    site = libraries[23203].parents[3]
    about = site / "nvidia_nccl_cu13-2.32.3.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: 2.32.3\n")
    code = f"import sys; sys.path.append({str(site)!r})\n" + SHOW
    found = found_in_new_process(code, LD_PRELOAD=str(libraries[22809]))
    assert found == "23203 | installed wheel, loaded apart from torch's"
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: 2.29.7\n")
    assert found_in_new_process(code, LD_PRELOAD=str(libraries[22809])) == "22809 | loaded before"


def test_use_nccl(libraries: dict[int, Path]) -> None:
    folder = str(libraries[23203].parents[3])
    code = f"import tide\nprint(tide.use_nccl({folder!r}))\n" + SHOW
    assert found_in_new_process(code).split("\n") == ["2.32.3", "23203 | tide.use_nccl, apart from torch's"]
    code = (
        f"import tide, ctypes, os\ntide.use_nccl({folder!r}, torch_too=True)\n"
        "found = ctypes.CDLL('libnccl.so.2', os.RTLD_NOLOAD)\nprint(tide.nccl_library.version_of(found))"
    )
    assert found_in_new_process(code) == "23203"


def test_use_nccl_refuses(libraries: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_library, "_chosen", None)
    with pytest.raises(CapabilityError, match=r"is NCCL 2\.28\.9; puts need NCCL 2\.31"):
        tide.use_nccl(libraries[22809])
    with pytest.raises(InputError, match=r"no libnccl\.so\.2 at"):
        tide.use_nccl(tmp_path / "nowhere")
    with pytest.raises(InputError, match="before the first `import torch`"):
        tide.use_nccl(libraries[23203], torch_too=True)
    assert tide.use_nccl(libraries[23203]) == "2.32.3"
    assert tide.use_nccl(libraries[23203].parent) == "2.32.3"
    with pytest.raises(InputError, match="TIDE uses another NCCL already"):
        tide.use_nccl(libraries[23102])


def test_structures_have_nccls_sizes() -> None:
    assert ctypes.sizeof(nccl.Config) == 120
    assert ctypes.sizeof(nccl.Properties) == 152
    assert ctypes.sizeof(nccl.SignalsAwaited) == 16
    places = {
        name: getattr(nccl.Config, name).offset for name in ("CTAPolicy", "numRmaCtx", "numRmaSig", "rmaEagerInit")
    }
    assert places == {"CTAPolicy": 60, "numRmaCtx": 84, "numRmaSig": 100, "rmaEagerInit": 104}
    found = {name: getattr(nccl.Properties, name).offset for name in ("nLsaTeams", "hostRmaSupport", "commHash")}
    assert found == {"nLsaTeams": 40, "hostRmaSupport": 44, "commHash": 56}
