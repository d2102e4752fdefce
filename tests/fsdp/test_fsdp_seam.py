"""The pieces of the seam by themselves: dispatchers, tensors without memory, re-pointed storages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.utils._python_dispatch import TorchDispatchMode

from tide.errors import CapabilityError
from tide.fsdp import seam, streams, versions
from tide.fsdp.virtual import FlatGradients, WholeGradient

CPU = torch.device("cpu")


class Seen(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_dispatchers_are_counted_and_restored() -> None:
    before = {name: getattr(holder, name, None) for holder, name, _ in seam._PLACES}
    seam.install()
    seam.install()
    assert seam.installed()
    assert param_group.foreach_reduce is not before["foreach_reduce"]
    seam.uninstall()
    assert seam.installed()
    seam.uninstall()
    assert {name: getattr(holder, name, None) for holder, name, _ in seam._PLACES} == before


def test_a_function_put_on_top_of_a_dispatcher_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not become what the dispatcher takes for stock: the two would call each other for ever."""
    stock = collectives.foreach_reduce_scatter_copy_in
    calls: list[str] = []
    monkeypatch.setattr(collectives, "foreach_reduce_scatter_copy_in", lambda *args: calls.append("stock"))
    seam.install()
    ours = collectives.foreach_reduce_scatter_copy_in

    def on_top(*args: Any) -> None:
        calls.append("on top")
        ours(*args)

    monkeypatch.setattr(collectives, "foreach_reduce_scatter_copy_in", on_top)
    seam.uninstall()
    assert collectives.foreach_reduce_scatter_copy_in is on_top
    collectives.foreach_reduce_scatter_copy_in([], torch.empty(0), 1)
    assert calls == ["on top", "stock"]
    seam.install()
    collectives.foreach_reduce_scatter_copy_in([], torch.empty(0), 1)
    assert calls == ["on top", "stock", "stock"]
    seam.uninstall()
    monkeypatch.undo()
    assert collectives.foreach_reduce_scatter_copy_in is stock


def test_streams_become_current_and_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what torch.cuda itself calls; where another device is current, by torch.cuda, which switches it too."""
    now = {0: (7, 0, 1), 1: (9, 1, 1)}

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        now[device_index] = stream_id, device_index, device_type

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", now.__getitem__, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_setStream", set_stream, raising=False)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: ("torch's", stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "torch's")
    here, there = (SimpleNamespace(stream_id=3, device_index=device, device_type=1) for device in (0, 1))
    assert streams.on(torch.cuda, there) == ("torch's", there)
    assert streams.current(torch.cuda, here) == streams.current(torch.cuda, there) == "torch's"
    for error in (None, RuntimeError):
        try:
            with streams.on(torch.cuda, here), streams.on(torch.cuda, here):
                assert now == {0: (3, 0, 1), 1: (9, 1, 1)}
                assert streams.current(torch.cuda, here) is here
                if error is not None:
                    raise error
        except RuntimeError:
            pass
        assert now == {0: (7, 0, 1), 1: (9, 1, 1)}


def test_gradients_pass_without_an_operator() -> None:
    grads = [torch.randn(3, 8), torch.randn(5)]
    whole = WholeGradient(grads[0])
    with Seen() as seen, torch.no_grad():
        assert whole.size(1) == 8
        assert whole.dtype is torch.float32
        rows = torch.cat(torch.chunk(whole, 4, dim=1), dim=0)
        assert rows.size() == (12, 2)
        flat = FlatGradients((44,), torch.bfloat16, CPU)
        flat.capture([rows, grads[1]])
    assert seen.names == []
    assert [id(grad) for grad in flat.record.grads] == [id(grad) for grad in grads]


def test_views_and_divisions_are_noted() -> None:
    grads = [torch.randn(4)]
    flat = FlatGradients((8,), torch.float32, CPU)
    view = flat.view(2, -1)
    assert view.shape == (2, 4)
    for operator in versions.copy_in_operators():
        operator(grads, 0, 2, out=view)
    flat.div_(2.0)
    flat.div_(4)
    assert flat.record.grads[0] is grads[0]
    assert flat.record.divided == 8.0


def test_unknown_operators_are_refused() -> None:
    with pytest.raises(CapabilityError, match=r"aten\.mul.* which tide.attach does not know"):
        FlatGradients((8,), torch.float32, CPU).mul(2)
    with pytest.raises(CapabilityError, match=r"aten\.add"):
        WholeGradient(torch.ones(2)).add_(1)


def test_scale_and_divisor() -> None:
    assert versions.scale_of(ReduceOp.AVG, 3, None) == (1.0, 3.0)
    assert versions.scale_of(ReduceOp.SUM, 3, None) == (1.0, 1.0)
    premultiplied = torch.distributed._make_nccl_premul_sum(0.125)
    assert versions.scale_of(premultiplied, 3, 8.0) == (0.125, 1.0)
    with pytest.raises(CapabilityError, match="is not known"):
        versions.scale_of(ReduceOp.MAX, 3, None)


@pytest.mark.skipif(not versions.can_swap(), reason="torch 2.11 cannot point a storage at other memory")
@pytest.mark.parametrize("sizes", [(6, 6), (6, 4), (4, 6), (6, 0), (0, 6)])
def test_swap(sizes: tuple[int, int]) -> None:
    one, two = (torch.arange(float(size)) + 10 * size for size in sizes)
    expected, addresses = (one.tolist(), two.tolist()), (one.data_ptr(), two.data_ptr())
    bytes_of = [tensor.untyped_storage().nbytes() for tensor in (one, two)]
    versions.swap(one, two)
    assert (two.untyped_storage().data_ptr(), one.untyped_storage().data_ptr()) == addresses
    assert [tensor.untyped_storage().nbytes() for tensor in (two, one)] == bytes_of
    versions.swap(one, two)
    assert (one.tolist(), two.tolist()) == expected


def test_this_torch_is_known() -> None:
    versions.check()
    versions.check_copy_in()


@pytest.mark.parametrize(
    ("name", "damaged", "told"),
    [
        ("foreach_all_gather", lambda params, group: None, "foreach_all_gather takes"),
        ("foreach_reduce", None, "has no foreach_reduce"),
    ],
)
def test_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, damaged: Any, told: str) -> None:
    if damaged is None:
        monkeypatch.delattr(param_group, name)
    else:
        monkeypatch.setattr(param_group, name, damaged)
    versions.problem.cache_clear()
    try:
        with pytest.raises(CapabilityError, match=f"torch 2.11 to 2.15.*{told}.*Nothing was changed"):
            versions.check()
    finally:
        monkeypatch.undo()
        versions.problem.cache_clear()


def test_a_copy_in_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        collectives,
        "foreach_reduce_scatter_copy_in",
        lambda grads, flat, world: flat.view(world, -1).copy_(torch.cat([grad.flatten() for grad in grads])),
    )
    with pytest.raises(CapabilityError, match="copies gradients in another way"):
        versions.check_copy_in()
