"""Signals and waits: that they match, that all programs end, and what is known to have happened when.

A wait consumes the signals of one peer on one lane in their order, so each wait stands for one signal
step, its *source*; three rules make that exact: a counter is signalled by one queue, waited for by
one queue, and has a word of its own in the arena. Counters only grow, hence running every queue as far
as it goes finds a deadlock if there is one, and the rounds of that run order all steps.

What a queue knows at a step is, for every other queue, the last step that has certainly finished: it
follows from the waits before it. Facts are passed on through the queues of the two ranks concerned and
of the rank whose memory they share, not through others; that is less than all of happens-before, so what
is proved holds, and it needs no vector clock of all ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tide.compiler.columns import PUT, SIGNAL, WAIT, Bools
from tide.compiler.shard import Int64
from tide.compiler.steps import INITIAL_CREDIT, Lane
from tide.compiler.verify.scene import Scene
from tide.compiler.verify.tables import Tables, lane_name
from tide.compiler.verify.words import strangers

Int32 = npt.NDArray[np.int32]

_LANES = 64  # more than there are lanes, also in a damaged program
_RELAXATIONS = 3
#: Steps that are handled at a time where temporary arrays would weigh.
_PART = 1 << 20


class Order:
    """Order of the steps of one collective.

    Parameters
    ----------
    scene : Scene
        For messages.
    tables : Tables
        Steps. Signals of positions that are not loaded are taken to arrive.

    Attributes
    ----------
    level : ndarray of int32 or int64, shape (S,)
        Round in which a step runs; sorting by (level, number) gives a legal order of all steps.
    credit_wait, credit_signal : ndarray of int64
        Waits that consume a signal of the *previous* collective on this slot, and the step of a
        collective whose signal the next one consumes: pairs of steps of the same counter.
    """

    level: npt.NDArray[np.signedinteger[Any]]
    credit_wait: Int64
    credit_signal: Int64

    def __init__(self, scene: Scene, tables: Tables) -> None:
        self.scene, self.tables = scene, tables
        self._match()
        self._run()
        self._index()

    # Matching ------------------------------------------------------------------------------------

    def _counter(self, receiver: Int64, sender: Int64, lane: Int64) -> Int64:
        return (receiver * self.scene.size + sender) * _LANES + lane

    def _spell(self, counter: int) -> tuple[int, int, str]:
        """Receiver, sender and lane name of a counter."""
        pair, lane = divmod(counter, _LANES)
        receiver, sender = divmod(pair, self.scene.size)
        return receiver, sender, lane_name(lane)

    def _match(self) -> None:
        t, scene = self.tables, self.scene
        wrong = np.flatnonzero(t.is_kind(PUT, SIGNAL, WAIT) & ((t.lane < 0) | (t.lane >= len(Lane))))
        if len(wrong):
            scene.fail(f"no lane {t.lane[wrong[0]]}", step=t.describe(int(wrong[0])))
        signals, signal_key = self._by_counter((PUT, SIGNAL), "signalled")
        waits, wait_key = self._by_counter((WAIT,), "waited for")
        keys, signal_of, signal_sum, totals = _running(signal_key, t.count[signals])
        waited, wait_of, wait_sum, waited_totals = _running(wait_key, t.count[waits])
        if not (np.array_equal(keys, waited) and np.array_equal(totals, waited_totals)):
            self._report_mismatch(keys, totals, waited, waited_totals, signals, signal_key, waits, wait_key)
        del signal_key, wait_key
        self._check_words(keys)
        # Keys are equal now, so `signal_of` and `wait_of` number the same counters.
        lanes = keys % _LANES
        initial = np.zeros(len(keys), dtype=np.int64)
        for lane, credit in INITIAL_CREDIT.items():
            initial[lanes == lane] = credit
        wait_sum -= initial[wait_of]
        scale = int(totals.max(initial=0)) + 1
        signal_sum += signal_of * scale
        now = wait_sum > 0
        need = wait_of[now] * scale + wait_sum[now]
        source = np.full(len(waits), -1, dtype=np.int32)
        source[now] = signals[np.searchsorted(signal_sum, need)]
        # The others are satisfied by the last signals of the collective before, which were left over.
        self.credit_wait = waits[~now].astype(np.int64)
        left = wait_sum[~now] + totals[wait_of[~now]]
        scarce = np.flatnonzero(left <= 0)
        if len(scarce):
            step = int(self.credit_wait[scarce[0]])
            scene.fail("more initial credit than signals of a collective", step=t.describe(step))
        found = signals[np.searchsorted(signal_sum, wait_of[~now] * scale + left)]
        self.credit_signal = found.astype(np.int64)
        order = np.argsort(waits)
        self.wait, self.source = waits[order], source[order]

    def _check_words(self, keys: Int64) -> None:
        """Each counter is in a word of its own: the layout knows its source."""
        pair, lane = np.divmod(keys, _LANES)
        receiver, sender = np.divmod(pair, self.scene.size)
        wrong = np.flatnonzero(strangers(self.scene.context.team, receiver, sender, lane))
        if len(wrong):
            to, giver, name = self._spell(int(keys[wrong[0]]))
            self.scene.fail(f"{self.scene.name(to)} has no word for signals {name} of {self.scene.name(giver)}")

    def _by_counter(self, kinds: tuple[int, ...], verb: str) -> tuple[Int32, Int64]:
        """Steps that signal or wait, sorted by counter, and their counters; checks that each has one queue."""
        t = self.tables
        steps = np.flatnonzero(t.is_kind(*kinds)).astype(np.int32)
        if not t.loaded.all():
            steps = steps[t.loaded[t.peer[steps]]]
        me, peer, lane = t.position(steps), t.peer[steps].astype(np.int64), t.lane[steps].astype(np.int64)
        key = self._counter(me, peer, lane) if WAIT in kinds else self._counter(peer, me, lane)
        del me, peer, lane
        order = _sorted(key)
        steps, key = steps[order], key[order]
        queue = t.queue[steps]
        mixed = np.flatnonzero((key[1:] == key[:-1]) & (queue[1:] != queue[:-1]))
        if len(mixed):
            receiver, sender, name = self._spell(int(key[mixed[0]]))
            self.scene.fail(
                f"{name} signals of {self.scene.name(sender)} to {self.scene.name(receiver)} are {verb} by two "
                f"streams, so their order is not defined; the other is {t.describe(int(steps[mixed[0]]))}",
                step=t.describe(int(steps[mixed[0] + 1])),
            )
        return steps, key

    def _report_mismatch(
        self,
        keys: Int64,
        totals: Int64,
        waited: Int64,
        waited_totals: Int64,
        signals: Int32,
        signal_key: Int64,
        waits: Int32,
        wait_key: Int64,
    ) -> None:
        sent, used = (
            dict(zip(keys.tolist(), totals.tolist(), strict=True)),
            dict(zip(waited.tolist(), waited_totals.tolist(), strict=True)),
        )
        counter = min(key for key in sent.keys() | used.keys() if sent.get(key, 0) != used.get(key, 0))
        receiver, sender, lane = self._spell(counter)
        have, want = sent.get(counter, 0), used.get(counter, 0)
        steps = waits[wait_key == counter] if want > have else signals[signal_key == counter]
        self.scene.fail(
            f"{self.scene.name(sender)} gives {have} {lane} signals to {self.scene.name(receiver)}, which waits for "
            f"{want}; " + ("a signal is missing" if want > have else "a wait is missing"),
            step=self.tables.describe(int(steps[-1])),
        )

    # Running -------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Runs all queues in rounds; a queue passes at most one wait a round."""
        t = self.tables
        real = self.source >= 0
        waits, sources = self.wait[real], self.source[real]
        queue, source_queue = t.queue[waits].astype(np.int64), t.queue[sources].astype(np.int64)
        count = len(t.queue_start)
        pointer = np.searchsorted(queue, np.arange(count))
        stop = np.searchsorted(queue, np.arange(count), side="right")
        waits_and_end = np.append(waits, t.steps)
        done = np.where(pointer < stop, waits_and_end[pointer], t.queue_stop)
        level = np.zeros(len(waits), dtype=np.int64)
        active, turn = np.flatnonzero(pointer < stop), 0
        while len(active):
            turn += 1
            current = pointer[active]
            passes = sources[current] < done[source_queue[current]]
            if not passes.any():
                self._report_deadlock(waits[current], sources[current])
            moved, passed = active[passes], current[passes]
            level[passed] = turn
            passed = passed + 1
            pointer[moved] = passed
            ended = passed == stop[moved]
            done[moved] = np.where(ended, t.queue_stop[moved], waits_and_end[passed])
            if ended.any():
                active = active[pointer[active] < stop[active]]
        narrow: type[np.signedinteger[Any]] = np.int32 if count * (turn + 1) < 2**31 else np.int64
        self.level = np.zeros(t.steps, dtype=narrow)
        self.level[waits] = level
        # Within a queue, steps run in the round of the last wait before them.
        offset = (np.arange(count) * (turn + 1)).astype(narrow)
        for start in range(0, t.steps, _PART):
            part = slice(start, min(start + _PART, t.steps))
            self.level[part] += offset[t.queue[part]]
        np.maximum.accumulate(self.level, out=self.level)
        for start in range(0, t.steps, _PART):
            part = slice(start, min(start + _PART, t.steps))
            self.level[part] -= offset[t.queue[part]]

    def _report_deadlock(self, blocked: Int32, sources: Int32) -> None:
        t = self.tables
        next_queue = {int(t.queue[w]): (int(w), int(t.queue[s])) for w, s in zip(blocked, sources, strict=True)}
        queue, path = min(next_queue), []
        while queue in next_queue and queue not in path:
            path.append(queue)
            queue = next_queue[queue][1]
        cycle = path[path.index(queue) :] if queue in path else path
        steps = [t.describe(next_queue[q][0]) for q in cycle]
        shown = " ← ".join(steps[:6]) + (" ← …" if len(steps) > 6 else "")
        self.scene.fail(f"deadlock: {len(steps)} streams wait for each other: {shown}", step=steps[0])

    # Knowledge -----------------------------------------------------------------------------------

    def _index(self) -> None:
        t = self.tables
        real = self.source >= 0
        waits, sources = self.wait[real], self.source[real]
        self._queues = len(t.queue_start)
        self._scale = t.steps + 1
        key = t.queue[waits].astype(np.int64) * self._queues + t.queue[sources]
        order = _sorted(key)  # waits ascend already
        key, waits, sources = key[order], waits[order], sources[order]
        self._known = np.zeros(0, dtype=np.int32)
        if len(key):  # running maxima within each pair of queues
            group = np.cumsum(np.concatenate(([0], key[1:] != key[:-1])), dtype=np.int64) * self._scale
            self._known = (np.maximum.accumulate(sources + group) - group).astype(np.int32)
        key *= self._scale
        key += waits
        self._key = key

    def known(self, queue: Int64, bound: Int64, other: Int64) -> Int64:
        """Last step of queue ``other`` that has finished when ``queue`` has run its steps below ``bound``.

        Only by waits of ``queue`` itself; -1 if none is known. Queue -1 knows nothing and is not known.
        """
        pair = queue * self._queues + other
        row = np.searchsorted(self._key, pair * self._scale + bound) - 1
        found = np.full(len(row), -1, dtype=np.int64)
        ok = (row >= 0) & (queue >= 0) & (other >= 0)
        ok[ok] = self._key[row[ok]] // self._scale == pair[ok]
        found[ok] = self._known[row[ok]]
        return found

    def knowledge(self, queue: Int64, bound: Int64, ranks: list[Int64]) -> tuple[Int64, Int64]:
        """What a queue knows, also through the queues of ``ranks``.

        Parameters
        ----------
        queue, bound : ndarray of int64, shape (n,)
            The queue, and the first of its steps that has not run.
        ranks : list of ndarray of int64, shape (n,)
            Positions whose queues pass facts on.

        Returns
        -------
        queues, last : ndarray of int64, shape (n, c)
            Queues of those positions, and the last finished step of each that is known, or -1.
        """
        queues = np.concatenate([self.tables.queue_of[r] for r in ranks] + [queue[:, None]], axis=1)
        last = np.stack([self.known(queue, bound, queues[:, c]) for c in range(queues.shape[1])], axis=1)
        own = (queues == queue[:, None]) & (bound > self.tables.queue_start[queue])[:, None]
        last = np.where(own, (bound - 1)[:, None], last)
        for _ in range(_RELAXATIONS):
            before = last.copy()
            for via in range(queues.shape[1]):
                some = np.flatnonzero(last[:, via] >= 0)
                if not len(some):
                    continue
                for c in range(queues.shape[1]):
                    more = self.known(queues[some, via], last[some, via] + 1, queues[some, c])
                    last[some, c] = np.maximum(last[some, c], more)
            if np.array_equal(before, last):
                break
        return queues, last

    def before(self, first: Int64, queue: Int64, bound: Int64, memory: Int64 | None = None) -> Bools:
        """Whether step ``first`` has finished once ``queue`` has run all its steps below ``bound``.

        Parameters
        ----------
        first : ndarray of int64, shape (n,)
            Steps.
        queue, bound : ndarray of int64, shape (n,)
            The later side; for a step ``s``, its queue and ``s`` itself.
        memory : ndarray of int64, shape (n,), optional
            Position whose memory both sides touch; its queues may pass the fact on. A put into that
            memory counts as finished only where the memory's own rank has waited for its signal: a put's
            end at the sender says nothing about its arrival.
        """
        t, position = self.tables, self.tables.queue_position
        first_queue = t.queue[first].astype(np.int64)
        holds: Bools = np.where(first_queue == queue, first < bound, self.known(queue, bound, first_queue) >= first)
        arrives = np.zeros(len(first), dtype=bool)
        if memory is not None:
            arrives = (t.kind[first] == PUT) & (t.peer[first] == memory)
            holds &= ~arrives | (position[queue] == memory)
        rest = np.flatnonzero(~holds & ~arrives)
        if len(rest):
            ranks = [position[first_queue[rest]], position[queue[rest]]]
            if memory is not None:
                ranks.append(memory[rest])
            queues, last = self.knowledge(queue[rest], bound[rest], ranks)
            holds[rest] = ((queues == first_queue[rest][:, None]) & (last >= first[rest][:, None])).any(axis=1)
        rest = np.flatnonzero(~holds & arrives)
        if len(rest) and memory is not None:
            queues, last = self.knowledge(queue[rest], bound[rest], [position[queue[rest]], memory[rest]])
            for c in range(queues.shape[1]):
                there = (queues[:, c] >= 0) & (last[:, c] >= 0)
                there &= position[queues[:, c]] == memory[rest]
                seen = self.known(queues[:, c], last[:, c] + 1, first_queue[rest]) >= first[rest]
                holds[rest] |= there & seen
        return holds

    def steps_before(self, first: Int64, second: Int64, memory: Int64 | None = None) -> Bools:
        """Whether step ``first`` has finished before step ``second`` starts."""
        return self.before(first, self.tables.queue[second].astype(np.int64), second, memory)

    def aware(self, step: Int64, position: Int64) -> Bools:
        """Whether at ``step`` it is known that ``position`` has begun this collective."""
        queue = self.tables.queue[step].astype(np.int64)
        mine = self.tables.queue_position[queue]
        queues, last = self.knowledge(queue, step, [position, mine])
        theirs = np.where(queues >= 0, self.tables.queue_position[queues], -1) == position[:, None]
        holds: Bools = (theirs & (last >= 0)).any(axis=1) | (mine == position)
        return holds


def _sorted(key: Int64) -> Int64:
    """Stable order of keys that are not negative: 16 bits at a time, which NumPy sorts by counting."""
    order = np.argsort((key & 0xFFFF).astype(np.uint16), kind="stable")
    for shift in range(16, int(key.max(initial=0)).bit_length(), 16):
        digit = ((key >> shift) & 0xFFFF).astype(np.uint16)
        order = order[np.argsort(digit[order], kind="stable")]
    return order


def _running(key: Int64, count: Int32) -> tuple[Int64, Int64, Int64, Int64]:
    """Groups of equal keys, which stand together: keys, group of each row, running sum in it, and totals."""
    if not len(key):
        return key, key, key, key
    head = np.concatenate(([True], key[1:] != key[:-1]))
    starts = np.flatnonzero(head)
    group = np.cumsum(head, dtype=np.int64) - 1
    total = np.cumsum(count, dtype=np.int64)
    ends = total[np.append(starts[1:], len(key)) - 1]
    before = np.concatenate(([0], ends[:-1]))
    total -= before[group]
    return key[starts], group, total, ends - before
