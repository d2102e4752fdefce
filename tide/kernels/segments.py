"""Division of strided blocks into segments and tiles: the host side of every kernel here.

A *block* is ``runs`` runs of ``count`` elements, the same for all its operands (a destination and one or more
sources), each operand with its own address and pitch. One launch covers many blocks. Before it, each block is
divided into *segments* of one kind each:

``flat``
    contiguous in every operand, all addresses on 16 bytes: whole vectors, no row arithmetic;
``strided``
    several runs, all addresses and pitches on 16 bytes: whole vectors, with a row for each vector;
``narrow``
    everything else, element by element: odd offsets, odd pitches, and the heads and tails of the other kinds.

The segments of one kind are cut into tiles of equal size, and the tiles go to the programs in contiguous ranges
of equal length. So a program reads a segment's record once, and the loop over that segment's tiles depends on no
further load: that is what lets the loop keep many transfers in flight.

Nothing in this module imports torch or Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tide.errors import InputError

#: Bytes of one vector access; wide segments keep every address and every pitch on it.
VECTOR_BYTES = 16

#: Elements of one segment at most, so that offsets within a segment fit 32 bits. Addresses are always 64 bits.
MAX_SEGMENT = 1 << 30

KINDS = ("flat", "strided", "narrow")

#: int64 words of a program's record: for each kind the first segment, the first tile and the end tile.
PROGRAM_WORDS = 3 * len(KINDS)

#: int64 words of a segment's record before its operands: first tile, end tile, vectors, vectors per run, and
#: the multiplier and shift that divide by the latter.
HEADER_WORDS = 6

#: int64 words of each step in a chain's head, behind the number of steps.
STEP_WORDS = 2

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Block:
    """``runs`` × ``count`` elements, and where they lie in each operand.

    Parameters
    ----------
    runs, count
        Number of runs, elements of a run.
    addresses
        Byte address of the first element, one per operand. The destination comes first.
    pitches
        Elements between the starts of two runs, one per operand.
    item
        Number that messages call it by.
    """

    runs: int
    count: int
    addresses: tuple[int, ...]
    pitches: tuple[int, ...]
    item: int


class Segment(NamedTuple):
    """A part of a block that one kind of loop handles."""

    kind: int
    block: int
    runs: int
    vectors: int  # per run; of one element each in a narrow segment
    offsets: tuple[int, ...]  # bytes from the block's addresses
    pitches: tuple[int, ...]  # bytes


@dataclass(frozen=True)
class Division:
    """The tile sizes and the number of programs that a table is made for.

    Parameters
    ----------
    sizes
        Bytes of an element of each operand, the destination first.
    wide
        Elements of a tile of a flat or strided segment.
    narrow
        Elements of a tile of a narrow segment.
    programs
        Programs of the launch (CTAs).
    whole
        Flat segments have whole tiles only; what is left of a block, less than a tile, becomes a strided segment
        of one run. Tiles are then a power of two of elements.
    """

    sizes: tuple[int, ...]
    wide: int
    narrow: int
    programs: int
    whole: bool = False

    @property
    def vector(self) -> int:
        """Elements of a vector: 16 bytes of the operand with the smallest elements."""
        return VECTOR_BYTES // min(self.sizes)

    @property
    def segment_words(self) -> int:
        """int64 words of a segment's record: the header, then address and pitch of each operand."""
        return HEADER_WORDS + 2 * len(self.sizes)

    def tile_vectors(self, kind: int) -> int:
        """Vectors of a tile of one kind."""
        return self.narrow if KINDS[kind] == "narrow" else self.wide // self.vector


@dataclass(frozen=True)
class Table:
    """What a launch reads, as words, and what is needed to move its blocks to other addresses.

    Parameters
    ----------
    words
        int64, one dimension: ``programs`` program records, then the segment records. In a chain
        (:func:`make_chain`), a head and one such table after the other.
    programs
        Programs of the launch: those asked for, or fewer if there are fewer tiles.
    tiles
        Tiles of each kind; the launch has nothing to do if all are 0.
    addresses
        Byte addresses, (blocks × operands).
    positions
        Where each address lies in ``words``, (segments × operands): it says
        ``(addresses[blocks] + offsets) // units``.
    blocks
        Block of each segment, (segments).
    offsets, units
        Bytes, (segments × operands).
    """

    words: Int64s
    programs: int
    tiles: tuple[int, ...]
    addresses: Int64s
    positions: Int64s
    blocks: Int64s
    offsets: Int64s
    units: Int64s

    def moved(self, addresses: Int64s) -> Table | None:
        """The same table for other addresses.

        Parameters
        ----------
        addresses
            int64 byte addresses, (blocks × operands).

        Returns
        -------
        Table or None
            None if an address changed its place relative to 16 bytes: the division into segments may then be
            another one, and the table has to be made anew by :func:`make_table`.
        """
        if addresses.shape != self.addresses.shape:
            raise InputError(f"addresses of shape {addresses.shape} for {self.addresses.shape}")
        if np.any((addresses ^ self.addresses) & (VECTOR_BYTES - 1)):
            return None
        words = self.words.copy()
        words[self.positions] = (addresses[self.blocks] + self.offsets) // self.units
        return replace(self, words=words, addresses=addresses.copy())


def make_table(blocks: Sequence[Block], division: Division, programs: int | None = None) -> Table:
    """Divide blocks into segments, cut those into tiles and give the tiles to programs.

    Parameters
    ----------
    blocks
        Blocks with as many operands as ``division.sizes``. Runs or counts of 0 are allowed and cost nothing.
    division
        Tile sizes and the number of programs.
    programs
        Programs exactly, whether there are as many tiles or not; at most `division.programs` by default.

    Raises
    ------
    InputError
        For a negative extent, an address that is null or not on its element size, or a destination whose runs
        overlap; the message names the item and the operand.
    """
    segments: list[Segment] = []
    for index, block in enumerate(blocks):
        _check(block, division.sizes)
        segments += _divide(index, block, division)
    segments.sort(key=lambda segment: segment.kind)  # stable: within a kind, blocks keep their order
    return _pack(blocks, segments, division, programs)


def make_chain(steps: Sequence[Sequence[Block]], division: Division, counters: Sequence[int]) -> Table:
    """The tables of several steps that one launch carries out in order, behind a head that tells where they are.

    The head is the number of steps, and for each of them where its table begins, in words from the head, and the
    address of its counter. Every program takes part in every step, so that a step that all of them have counted has
    all steps before it done, too.

    Parameters
    ----------
    steps
        Blocks of each step.
    division
        Tile sizes and the number of programs.
    counters
        Address of a 32-bit word for each step, which every program adds 1 to once it has done its share of the step;
        0 for none.

    Raises
    ------
    InputError
        As :func:`make_table`.
    """
    tables = [make_table(blocks, division) for blocks in steps]
    programs = max(table.programs for table in tables)
    tables = [
        table if table.programs == programs else make_table(blocks, division, programs)
        for blocks, table in zip(steps, tables, strict=True)
    ]
    starts = np.cumsum([1 + STEP_WORDS * len(tables), *(len(table.words) for table in tables)])
    firsts = np.cumsum([0, *map(len, steps)])
    head = np.zeros(starts[0], np.int64)
    head[0] = len(tables)
    head[1::STEP_WORDS], head[2::STEP_WORDS] = starts[:-1], counters
    return Table(
        np.concatenate([head, *(table.words for table in tables)]),
        programs,
        tuple(map(sum, zip(*(table.tiles for table in tables), strict=True))),
        np.concatenate([table.addresses for table in tables]),
        np.concatenate([table.positions + start for table, start in zip(tables, starts[:-1], strict=True)]),
        np.concatenate([table.blocks + first for table, first in zip(tables, firsts[:-1], strict=True)]),
        np.concatenate([table.offsets for table in tables]),
        np.concatenate([table.units for table in tables]),
    )


def _check(block: Block, sizes: tuple[int, ...]) -> None:
    """Refuse a block that no launch can carry out."""
    name = f"item {block.item}"
    if len(block.addresses) != len(sizes) or len(block.pitches) != len(sizes):
        raise InputError(
            f"{name}: {len(sizes)} operands expected, got {len(block.addresses)} addresses "
            f"and {len(block.pitches)} pitches"
        )
    if block.runs < 0 or block.count < 0:
        raise InputError(f"{name}: negative extent, {block.runs} runs of {block.count} elements")
    if block.runs == 0 or block.count == 0:
        return
    for operand, (address, size) in enumerate(zip(block.addresses, sizes, strict=True)):
        if address <= 0 or address % size:
            where = f"source {operand - 1}" if operand else "destination"
            raise InputError(f"{name}: {where} at {address:#x}, which is null or not on {size} bytes")
    if block.runs > 1 and block.pitches[0] < block.count:
        raise InputError(f"{name}: destination runs of {block.count} elements overlap at a pitch of {block.pitches[0]}")


def _divide(index: int, block: Block, division: Division) -> list[Segment]:
    """Segments of one block: a wide body with a narrow head and tail, or all of it narrow."""
    runs, count, addresses, pitches = block.runs, block.count, block.addresses, block.pitches
    sizes, vector = division.sizes, division.vector
    if runs == 0 or count == 0:
        return []
    if runs > 1 and all(pitch == count for pitch in pitches):
        runs, count = 1, runs * count
    if runs == 1:
        pitches = (count,) * len(sizes)
    narrow = KINDS.index("narrow")

    def part(kind: int, start: int, length: int) -> list[Segment]:
        if length == 0:
            return []
        width = 1 if kind == narrow else vector
        offsets = tuple(start * size for size in sizes)
        steps = tuple(pitch * size for pitch, size in zip(pitches, sizes, strict=True))
        segment = Segment(kind, index, runs, length // width, offsets, steps)
        return _limited(segment, width, division)

    head = _head(addresses, pitches if runs > 1 else (), sizes, vector)
    # Below a narrow tile one program handles all of it at once; a body of its own would only add a segment.
    if head is None or runs * count <= division.narrow or count - head < vector:
        return part(narrow, 0, count)
    body = (count - head) // vector * vector
    strided = KINDS.index("strided")
    flat = 0 if runs > 1 else body
    if division.whole:
        flat = flat // division.wide * division.wide
    return (
        part(KINDS.index("flat"), head, flat)
        + part(strided, head + flat, body - flat)
        + part(narrow, 0, head)
        + part(narrow, head + body, count - head - body)
    )


def _head(addresses: tuple[int, ...], pitches: tuple[int, ...], sizes: tuple[int, ...], vector: int) -> int | None:
    """Elements before the first one that lies on 16 bytes in every operand and run; None if there is none."""
    if any(pitch * size % VECTOR_BYTES for pitch, size in zip(pitches, sizes, strict=False)):
        return None
    places = list(zip(addresses, sizes, strict=True))
    for head in range(vector):
        if all((address + head * size) % VECTOR_BYTES == 0 for address, size in places):
            return head
    return None


def _limited(segment: Segment, width: int, division: Division) -> list[Segment]:
    """The segment, in pieces of at most `MAX_SEGMENT` elements."""
    kind, block, runs, vectors, offsets, pitches = segment
    limit = MAX_SEGMENT // width
    if division.whole and KINDS[kind] == "flat":
        limit = max(1, MAX_SEGMENT // division.wide) * division.wide // width
    if runs * vectors <= limit:
        return [segment]
    pieces = []
    if vectors <= limit:
        step = limit // vectors
        for row in range(0, runs, step):
            moved = tuple(offset + row * pitch for offset, pitch in zip(offsets, pitches, strict=True))
            pieces.append(Segment(kind, block, min(step, runs - row), vectors, moved, pitches))
        return pieces
    if KINDS[kind] == "strided" and not division.whole:
        kind = KINDS.index("flat")  # one run at a time
    for row in range(runs):
        for start in range(0, vectors, limit):
            moved = tuple(
                offset + row * pitch + start * width * size
                for offset, pitch, size in zip(offsets, pitches, division.sizes, strict=True)
            )
            pieces.append(Segment(kind, block, 1, min(limit, vectors - start), moved, pitches))
    return pieces


def reciprocal(divisor: int) -> tuple[int, int]:
    """Multiplier and shift such that ``n // divisor == (2 * n * multiplier >> 32) >> shift``.

    Exact for every ``0 <= n < 2**31``; a 32-bit division costs many times as much on a GPU.

    Parameters
    ----------
    divisor
        1 to 2**31.
    """
    shift = (divisor - 1).bit_length()
    return -((-1 << (31 + shift)) // divisor), shift


def _pack(blocks: Sequence[Block], segments: list[Segment], division: Division, programs: int | None) -> Table:
    """Write the records."""
    operands, width = len(division.sizes), division.segment_words
    kinds = np.array([segment.kind for segment in segments], np.int64)
    totals = np.array([segment.runs * segment.vectors for segment in segments], np.int64)
    per_tile = np.array([division.tile_vectors(kind) for kind in range(len(KINDS))], np.int64)
    counts = -(-totals // per_tile[kinds])
    tiles = np.bincount(kinds, counts, minlength=len(KINDS)).astype(np.int64)
    if programs is None:
        programs = max(1, min(division.programs, int(tiles.sum())))

    base = programs * PROGRAM_WORDS
    words = np.zeros(base + len(segments) * width, np.int64)
    records = words[base:].reshape(len(segments), width)
    for kind in range(len(KINDS)):
        (members,) = np.nonzero(kinds == kind)
        ends = np.cumsum(counts[members])
        records[members, 0] = ends - counts[members]
        records[members, 1] = ends
        first = int(np.count_nonzero(kinds < kind))
        _distribute(words[:base].reshape(programs, PROGRAM_WORDS), kind, first, ends)
    records[:, 2] = totals
    records[:, 3:HEADER_WORDS] = [(segment.vectors, *reciprocal(segment.vectors)) for segment in segments] or np.zeros(
        (0, 3), np.int64
    )

    # Addresses and pitches are stored in units of what they are known to be multiples of: the kernel multiplies
    # them by the constant again, and so the compiler knows the alignment and emits 16-byte accesses.
    narrow = (kinds == KINDS.index("narrow"))[:, None]
    units = np.where(narrow, np.array(division.sizes, np.int64)[None, :], VECTOR_BYTES)
    addresses = np.array([block.addresses for block in blocks], np.int64).reshape(len(blocks), operands)
    owners = np.array([segment.block for segment in segments], np.int64)
    offsets = np.array([segment.offsets for segment in segments], np.int64).reshape(-1, operands)
    pitches = np.array([segment.pitches for segment in segments], np.int64).reshape(-1, operands)
    positions = base + np.arange(len(segments))[:, None] * width + HEADER_WORDS + 2 * np.arange(operands)
    words[positions] = (addresses[owners] + offsets) // units
    words[positions + 1] = pitches // units
    return Table(words, programs, tuple(tiles.tolist()), addresses, positions, owners, offsets, units)


def _distribute(programs: Int64s, kind: int, first: int, ends: Int64s) -> None:
    """Give contiguous ranges of one kind's tiles to the programs, their lengths equal to within one tile."""
    count = len(programs)
    tiles = int(ends[-1]) if len(ends) else 0
    bounds = np.arange(count + 1) * tiles // count
    # A kind with fewer tiles than programs would load the same programs as the next such kind: turn each kind
    # by a third of the programs against the one before.
    order = (np.arange(count) + kind * count // len(KINDS)) % count
    programs[order, 3 * kind] = first + np.searchsorted(ends, bounds[:-1], side="right")
    programs[order, 3 * kind + 1] = bounds[:-1]
    programs[order, 3 * kind + 2] = bounds[1:]
