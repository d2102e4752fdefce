"""The kernels in Triton's interpreter, on CPU memory, against their specification."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_support import (
    Backend,
    Shape,
    check_accumulate,
    check_place,
    interpreted,
)

from tide.errors import CapabilityError, InputError
from tide.multicast import OFF

# NumPy's, inside of the interpreter: infinities and NaN are among the inputs
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SAME = (*FLOATS, torch.float64, torch.uint8, torch.int64)
PAIRS = [(src, dst) for src in FLOATS for dst in FLOATS] + [(dtype, dtype) for dtype in SAME[3:]]


@pytest.fixture(scope="module")
def backend() -> Backend:
    return interpreted()


def small(backend: Backend, **changes: int | str):
    """Tiles so small that a few hundred elements make many."""
    return backend.launch.Tuning(**{"ctas": 3, "block": 128, "narrow": 32, "warps": 1, **changes})


@st.composite
def shapes(draw, operands: int) -> Shape:
    # Elements past 16 bytes: often the same for all, so that a vector body with a head and a tail exists.
    common = draw(st.integers(0, 9))
    offsets = draw(st.just((common,) * operands) | st.tuples(*[st.integers(0, 9)] * operands))
    gaps = draw(st.just((0,) * operands) | st.just((16,) * operands) | st.tuples(*[st.integers(0, 24)] * operands))
    runs, count = draw(
        st.tuples(st.just(1), st.integers(0, 700))
        | st.tuples(st.integers(0, 6), st.integers(0, 90))
        | st.tuples(st.integers(2, 9), st.sampled_from([16, 32, 48]))
    )
    return Shape(runs, count, gaps, offsets)


@settings(max_examples=40)
@given(
    blocks=st.lists(st.tuples(shapes(2), st.sampled_from(PAIRS)), min_size=1, max_size=5),
    ctas=st.integers(1, 7),
    seed=st.integers(0, 2**20),
    move=st.booleans(),
)
def test_place(backend: Backend, blocks, ctas, seed, move):
    flat = [(shape, src, dst) for shape, (src, dst) in blocks]
    table = check_place(backend, flat, small(backend, ctas=ctas), seed, move)
    assert table.launches <= len({pair for _, pair in blocks})
    assert all(programs <= ctas for programs in table.programs)


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_place_every_pair_of_types(backend: Backend, src, dst):
    """One flat, one strided and one narrow block of each pair, of every kind of value."""
    blocks = [
        (Shape(1, 531, (0, 0), (3, 3)), src, dst),
        (Shape(7, 48, (16, 32), (0, 0)), src, dst),
        (Shape(5, 19, (1, 0), (1, 2)), src, dst),
    ]
    assert check_place(backend, blocks, small(backend)).launches == 1


@pytest.mark.parametrize(("src", "dst"), [(torch.float32, torch.bfloat16), (torch.int64, torch.int64)], ids=str)
@pytest.mark.parametrize("lengths", [(3, 1, 2), (1, 5)])
def test_place_steps_in_one_launch(backend: Backend, src, dst, lengths):
    """Steps of many tiles, of few, and of none, in any order: all programs count all of them."""
    few = [Shape(1, 3, (0, 0), (1, 2)), Shape(1, 0, (0, 0), (0, 0))]
    many = [Shape(1, 531, (0, 0), (3, 3)), Shape(7, 48, (16, 32), (0, 0)), Shape(5, 19, (1, 0), (1, 2))]
    for shapes in ([*many, *few, many[0]], [few[1], *many, *few]):
        blocks = [(shape, src, dst) for shape in shapes]
        assert check_place(backend, blocks, small(backend, ctas=5), chain=lengths).programs == 5


def test_place_one_element(backend: Backend):
    for offset in range(9):
        block = Shape(1, 1, (0, 0), (offset, 9 - offset))
        check_place(backend, [(block, torch.float32, torch.bfloat16)], small(backend))


def test_place_nothing(backend: Backend):
    table = check_place(
        backend,
        [
            (Shape(0, 5, (0, 0), (0, 0)), torch.float32, torch.float32),
            (Shape(4, 0, (0, 0), (1, 1)), torch.float32, torch.bfloat16),
        ],
        small(backend),
    )
    assert table.launches == 0
    backend.place.PlaceTable([], tuning=small(backend)).launch()


def test_place_refuses(backend: Backend):
    item = (64, 64, 2, 8, 8, 8)
    make = backend.place.PlaceItem
    cases = {
        "no cast from torch.int32 to torch.float32": make(*item, torch.int32, torch.float32),
        "item 0: source 0 at 0x3": make(3, *item[1:], torch.float32, torch.float32),
        "item 0: destination at 0x0": make(64, 0, *item[2:], torch.float32, torch.float32),
        "overlap at a pitch of 7": make(*item[:5], 7, torch.float32, torch.float32),
        "negative extent": make(64, 64, -1, 8, 8, 8, torch.float32, torch.float32),
    }
    for message, bad in cases.items():
        with pytest.raises(InputError, match=message):
            backend.place.PlaceTable([bad], tuning=small(backend))
    table = backend.place.PlaceTable([], tuning=small(backend))
    with pytest.raises(InputError, match="0 addresses expected, got 1"):
        table.move([64])


@settings(max_examples=40)
@given(
    blocks=st.lists(
        st.tuples(shapes(4), st.integers(1, 4), st.sampled_from(FLOATS), st.sampled_from(FLOATS), st.booleans()),
        min_size=1,
        max_size=3,
    ),
    ctas=st.integers(1, 7),
    scale=st.sampled_from([1.0, 0.5, 1.0 / 3.0, 1024.0]),
    divisor=st.sampled_from([1.0, 2.0, 3.0, 7.0, 256.0]),
    seed=st.integers(0, 2**20),
    special=st.booleans(),
)
def test_accumulate(backend: Backend, blocks, ctas, scale, divisor, seed, special):
    tuning = small(backend, ctas=ctas)
    table = check_accumulate(backend, blocks, tuning, scale, divisor, seed, special)
    assert table.launches <= len({block[1:] for block in blocks})


@pytest.mark.parametrize("pieces", [1, 2, 3, 8, 16, 17, 33])
@pytest.mark.parametrize("base", [False, True])
def test_accumulate_number_of_pieces(backend: Backend, pieces, base):
    """Also with types that make the order of summation visible."""
    blocks = [
        (Shape(1, 300, (0,), (1,)), pieces, torch.bfloat16, torch.float32, base),
        (Shape(3, 32, (16,), (0,)), pieces, torch.bfloat16, torch.float32, base),
        (Shape(3, 17, (1, 2, 3), (0, 1, 2)), pieces, torch.bfloat16, torch.float32, base),
    ]
    assert check_accumulate(backend, blocks, small(backend), divisor=3.0).launches == 1


def test_accumulate_into_its_base(backend: Backend):
    blocks = [
        (Shape(1, 300, (0,), (1,)), 2, torch.bfloat16, torch.float32, True),
        (Shape(3, 17, (3,), (2,)), 2, torch.bfloat16, torch.float32, True),
    ]
    check_accumulate(backend, blocks, small(backend), scale=0.5, in_place=True)


def test_accumulate_in_order(backend: Backend):
    """Piece 0 first, and the base last: each other order gives another number."""
    pieces = [torch.tensor([value]) for value in (2.0**24, 1.0, -(2.0**24), 3.0)]
    base, out = torch.tensor([1.0]), torch.zeros(1)
    item = backend.accumulate.SumItem(
        tuple(piece.data_ptr() for piece in pieces),
        base.data_ptr(),
        out.data_ptr(),
        1,
        1,
        (1,) * 4,
        1,
        1,
        torch.float32,
    )
    backend.accumulate.AccumulateTable([item], tuning=small(backend)).launch()
    assert out.item() == 4.0  # base first gives 3, the last piece first 5


def test_accumulate_moves(backend: Backend):
    """New addresses with the same alignment, with another one, and a wrong number of them."""
    memory = torch.arange(4096.0)
    out = torch.zeros(4096)
    start, end = memory.data_ptr(), out.data_ptr()

    def item(src: int, dst: int, base: int = 0):
        return backend.accumulate.SumItem((src, src + 4096), base, dst, 1, 200, (0, 0), 0, 0, torch.float32)

    table = backend.accumulate.AccumulateTable([item(start, end)], tuning=small(backend))
    for shift in (0, 16, 32, 4, 12):
        out.zero_()
        table.move([(start + shift, start + 4096 + shift)], [end + 2 * shift])
        table.launch()
        first = shift // 4
        expected = torch.zeros(4096)
        expected[2 * first : 2 * first + 200] = memory[first : first + 200] + memory[1024 + first : 1224 + first]
        assert torch.equal(out, expected)
    with pytest.raises(InputError, match="2 pieces expected"):
        table.move([(start,)])
    with pytest.raises(InputError, match="stay without one"):
        table.move(base_ptrs=[start])
    with pytest.raises(InputError, match="1 entries expected, got 2"):
        table.move(dst_ptrs=[end, end])


def test_accumulate_refuses(backend: Backend):
    make = backend.accumulate.SumItem
    cases = {
        "item 0: no piece to sum": make((), 0, 64, 1, 8, (), 0, 8),
        "item 0: cannot sum torch.float64": make((64,), 0, 64, 1, 8, (8,), 0, 8, torch.float64),
        "3 operands expected, got 3 addresses and 2 pitches": make((64, 64), 0, 64, 1, 8, (8,), 0, 8),
        "source 1 at 0x41": make((64, 65), 0, 64, 1, 8, (8, 8), 0, 8),
    }
    for message, bad in cases.items():
        with pytest.raises(InputError, match=message):
            backend.accumulate.AccumulateTable([bad], tuning=small(backend))
    with pytest.raises(InputError, match="divisor"):
        backend.accumulate.AccumulateTable([], tuning=small(backend)).launch(divisor=0.0)


@pytest.mark.parametrize("gap", [8, 1], ids=["strided", "narrow"])
def test_offsets_beyond_two_gibibytes(backend: Backend, gap):
    """Runs more than 2**31 bytes apart, in both operands; only the pages that are touched exist."""
    pitch = (1 << 30) + gap  # bf16: more than 2 GiB
    size = 2 * (2 * pitch + 4096)
    reserve = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    with mmap.mmap(-1, size, flags=reserve) as one, mmap.mmap(-1, 2 * size, flags=reserve) as other:
        ctypes.memset(_address(one) + 2 * pitch, 0x3F, 400)
        source = np.frombuffer(one, np.uint16)
        target = np.frombuffer(other, np.float32)
        for run in range(3):
            source[run * pitch : run * pitch + 200] = np.arange(16000 + 300 * run, 16200 + 300 * run)
        item = backend.place.PlaceItem(
            _address(one), _address(other), 3, 200, pitch, pitch, torch.bfloat16, torch.float32
        )
        backend.place.PlaceTable([item], tuning=small(backend)).launch()
        summed = backend.accumulate.SumItem(
            (_address(one),) * 2, 0, _address(other) + 4096, 3, 200, (pitch,) * 2, 0, pitch
        )
        backend.accumulate.AccumulateTable([summed], tuning=small(backend)).launch()
        for run in range(3):
            bits = source[run * pitch : run * pitch + 200].astype(np.uint32) << 16
            assert np.array_equal(target[run * pitch : run * pitch + 200].view(np.uint32), bits)
            twice = target[1024 + run * pitch : 1024 + run * pitch + 200]
            assert np.array_equal(twice, 2 * bits.view(np.float32))
        del source, target, twice


def _address(region: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(region))


@pytest.mark.parametrize("limit", [64, 256])
def test_long_blocks_are_split(backend: Backend, limit, monkeypatch):
    """What a run of more than 2**30 elements goes through, at a smaller limit."""
    monkeypatch.setattr(backend.segments, "MAX_SEGMENT", limit)
    blocks = [
        (Shape(1, 1000, (0, 0), (1, 1)), torch.bfloat16, torch.float32),
        (Shape(5, 104, (8, 16), (0, 0)), torch.bfloat16, torch.float32),
        (Shape(3, 301, (1, 1), (0, 1)), torch.bfloat16, torch.float32),
        (Shape(40, 24, (8, 8), (0, 0)), torch.bfloat16, torch.float32),
    ]
    check_place(backend, blocks, small(backend))


class StandIn:
    """In place of the switch: sums, for each lane, the same offset of every rank's memory."""

    def __init__(self, multicast: int, partials: torch.Tensor) -> None:
        self.multicast, self.partials, self.seen = multicast, partials.numpy(), []

    def create_inline_asm(self, asm, constraints, values, types, pure, pack):
        addresses, valid = values[0].data, values[1].data.astype(bool)
        width = len(types)
        assert not pure
        assert pack == 1
        assert f"add{'.v4' if width == 4 else ''}.f32" in asm
        first = np.where(valid, (addresses.astype(np.int64) - self.multicast) // 4, 0)
        assert np.all(addresses[valid] % (4 * width) == 0), "unaligned multimem address"
        self.seen.append(width)
        results = []
        for lane in range(width):
            total = self.partials[0][first + lane]
            for rank in self.partials[1:]:
                total = total + rank[first + lane]
            results.append(np.where(valid, total, np.float32(0)))
        return Results(results)


class Results:
    def __init__(self, arrays: list[np.ndarray]) -> None:
        from triton import language as tl
        from triton.runtime.interpreter import TensorHandle

        self._handles = [TensorHandle(array.astype(np.float32), tl.float32) for array in arrays]

    def get_result(self, index: int):
        return self._handles[index]


#: Elements of the smallest tile that is moved by bulk copies as on a GPU: eight rows of the narrowest type.
TILE = 1024


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(0, 3 * TILE + 40), min_size=1, max_size=3),
    offset=st.integers(0, 9),
    pieces=st.integers(1, 4),
    types=st.tuples(st.sampled_from(FLOATS), st.sampled_from(FLOATS)),
    base=st.booleans(),
    ctas=st.integers(1, 5),
    seed=st.integers(0, 2**20),
)
def test_bulk_accumulate(backend: Backend, lengths, offset, pieces, types, base, ctas, seed):
    """Blocks of no, one and several whole tiles, with heads and tails, beside a strided one."""
    shapes = [Shape(1, length, (0,), (offset,)) for length in lengths] + [Shape(3, TILE + 16, (16,), (0,))]
    blocks = [(shape, pieces, *types, base) for shape in shapes]
    tuning = small(backend, ctas=ctas, block=TILE, bulk=True)
    check_accumulate(backend, blocks, tuning, 0.5, 3.0, seed, special=True)


@pytest.mark.parametrize("pieces", [1, 8, 16, 17])
def test_bulk_accumulate_number_of_pieces(backend: Backend, pieces):
    """More pieces than are unrolled come without bulk copies, and then need no whole tiles."""
    blocks = [(Shape(1, 2 * TILE + 77, (0,), (0,)), pieces, torch.bfloat16, torch.float32, False)]
    table = check_accumulate(backend, blocks, small(backend, block=TILE, bulk=True), divisor=float(pieces))
    ((form, tuning, _, _),) = table._groups
    assert backend.accumulate.division_of(form, tuning).whole == (pieces <= 16)


def test_bulk_accumulate_into_its_base(backend: Backend):
    blocks = [(Shape(1, 3 * TILE + 5, (0,), (0,)), 2, torch.bfloat16, torch.float32, True)]
    check_accumulate(backend, blocks, small(backend, block=TILE, bulk=True), in_place=True, special=True)


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_bulk_place(backend: Backend, src, dst):
    blocks = [
        (Shape(1, 2 * TILE + 531, (0, 0), (3, 3)), src, dst),
        (Shape(1, TILE, (0, 0), (0, 0)), src, dst),
        (Shape(1, TILE - 1, (0, 0), (0, 0)), src, dst),
        (Shape(7, 48, (16, 32), (0, 0)), src, dst),
    ]
    check_place(backend, blocks, small(backend, block=TILE, bulk=True), move=True)


def test_switch_reduce(backend: Backend, monkeypatch):
    """Addresses and masks of both instructions, against a stand-in that reads every rank's memory."""
    from triton.runtime.interpreter import InterpreterBuilder

    from tide.kernels.reference import switch_reduce_reference

    for name in OFF:
        monkeypatch.delenv(name, raising=False)
    partials = torch.randn(3, 4096)
    multicast = 1 << 44  # nothing is mapped there
    stand_in = StandIn(multicast, partials)
    monkeypatch.setattr(
        InterpreterBuilder, "create_inline_asm", lambda _, *arguments: stand_in.create_inline_asm(*arguments)
    )
    blocks = [(1, 701, 1, 1, 0, 0), (5, 48, 2000, 1000, 64, 56), (3, 7, 3000, 2001, 9, 7)]
    for dtype, based in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, True)):
        out, running = torch.zeros(4096, dtype=dtype), torch.randn(4096)
        items = [
            backend.switch_reduce.SwitchItem(
                multicast + 4 * src,
                out.data_ptr() + dtype.itemsize * dst,
                runs,
                count,
                src_pitch,
                dst_pitch,
                running.data_ptr() + 4 * dst if based else 0,
                dst_pitch,
                dst_dtype=dtype,
            )
            for runs, count, src, dst, src_pitch, dst_pitch in blocks
        ]
        backend.switch_reduce.SwitchReduceTable(items, tuning=small(backend, ctas=4)).launch(divisor=3.0)
        expected = torch.zeros(4096, dtype=dtype)
        for runs, count, src, dst, src_pitch, dst_pitch in blocks:
            parts = [rank[src:].as_strided((runs, count), (src_pitch, 1)) for rank in partials]
            target, base = (x[dst:].as_strided((runs, count), (dst_pitch, 1)) for x in (expected, running))
            switch_reduce_reference(parts, target, base if based else None, divisor=3.0)
        assert torch.equal(out, expected), (dtype, based)
    assert set(stand_in.seen) == {1, 4}


def test_switch_reduce_takes_no_other_type(backend: Backend, monkeypatch):
    """Of bfloat16 operands the switch returns a bfloat16 sum: never for an fp32 shard."""
    for name in OFF:
        monkeypatch.delenv(name, raising=False)
    item = backend.switch_reduce.SwitchItem(1 << 44, 1 << 20, 1, 8, 0, 0, src_dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"item 0: the switch sums float32; .* rounded to torch.bfloat16"):
        backend.switch_reduce.SwitchReduceTable([item], tuning=small(backend))


@pytest.mark.parametrize(
    ("variable", "value"),
    [("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"), ("NVSHMEM_DISABLE_NVLS", "1")],
)
def test_switch_reduce_refuses_without_multicast(backend: Backend, variable, value, monkeypatch):
    for name in OFF:
        monkeypatch.delenv(name, raising=False)
    table = backend.switch_reduce.SwitchReduceTable([], tuning=small(backend))
    table.launch()
    monkeypatch.setenv(variable, value)
    for attempt in (table.launch, lambda: backend.switch_reduce.SwitchReduceTable([])):
        with pytest.raises(CapabilityError, match=f"{variable}={value}"):
            attempt()
