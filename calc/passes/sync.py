"""Sync: waits and signals wherever one engine uses memory that another has used.

The emitter's order is the order of meaning. For each pair of engines there is one counting semaphore; a dependence
of an access on engine e2 on an earlier one on e1 becomes, at the place of the later access, ``SIGNAL`` on e1 (which
its queue reaches after everything dispatched to it before) and ``WAIT`` on e2. Because both stand at one place, the
n-th wait always meets the n-th signal, also inside loops and where a loop runs zero times.

A loop is one access to its parent: what it needs from before is waited for ahead of it. Inside, the body is ordered
on its own; what its next iteration needs from this one is ordered at the body's end.

Accesses are compared by address range, so buffers that share SRAM one after the other are ordered too. The weight
ring and the read-only weights order themselves (`manual`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from calc.core.isa import FIRST_SYNC_SEMAPHORE, Engine, Op
from calc.kernels.program import Buffer, Instr, LoopNode

ENGINES = len(Engine)
Node = Instr | LoopNode


def semaphore(src: Engine, dst: Engine) -> int:
    """The semaphore that orders `dst` after `src`."""
    return FIRST_SYNC_SEMAPHORE + int(src) * ENGINES + int(dst)


@dataclass(frozen=True)
class _Access:
    engine: Engine
    buf: Buffer
    write: bool


@dataclass
class _State:
    """What has been accessed, by buffer and engine, and how far each engine knows the others' progress."""

    last: dict[int, dict[tuple[Engine, bool], int]] = field(default_factory=dict)
    known: dict[tuple[Engine, Engine], int] = field(default_factory=dict)
    now: int = 0


class Sync:
    """Puts waits and signals into one program (see the module)."""

    def __init__(self) -> None:
        self._overlaps: dict[int, list[int]] = {}

    def run(self, body: list[Node]) -> list[Node]:
        """The body with waits and signals. Addresses must have been assigned."""
        bufs = {id(a.buf): a.buf for item in body for a in self._accesses(item)}
        self._overlaps = _overlaps(list(bufs.values()))
        return self._sequence(body, _State(), loop=False)

    def _sequence(self, body: list[Node], state: _State, *, loop: bool) -> list[Node]:
        out = list(self._ordered(body, state))
        if loop:
            # the next iteration, from the state this one leaves: what it lacks is supplied at the body's end
            carried = _Carried(state.now)
            for item in out:
                self._replay(item, state, carried)
            out += list(_fence(sorted(carried.pairs), _node_of(body)))
        return out

    def _ordered(self, body: list[Node], state: _State) -> Iterator[Node]:
        for item in body:
            accesses = list(self._accesses(item))
            while need := self._needs(accesses, state):
                # one at a time: what the first brings may make the others superfluous
                yield from _fence(need[:1], item.node)
                _learn(state, *need[0])
            state.now += 1
            if isinstance(item, LoopNode):
                item.body = self._sequence(item.body, _State(), loop=True)
            self._note(accesses, state)
            yield item

    def _replay(self, item: Node, state: _State, carried: _Carried) -> None:
        if isinstance(item, Instr) and item.op is Op.SIGNAL and item.imm[0] >= FIRST_SYNC_SEMAPHORE:
            src, dst = divmod(item.imm[0] - FIRST_SYNC_SEMAPHORE, ENGINES)
            _learn(state, Engine(src), Engine(dst))
            return
        accesses = list(self._accesses(item))
        for src, dst in self._needs(accesses, state):
            carried.pairs.add((src, dst))
            # at the body's end everything of this iteration is known
            state.known[(src, dst)] = max(state.known.get((src, dst), -1), carried.start)
        state.now += 1
        self._note(accesses, state)

    def _accesses(self, item: Node) -> Iterator[_Access]:
        if isinstance(item, LoopNode):
            seen: set[tuple[Engine, int, bool]] = set()
            for sub in item.body:
                for a in self._accesses(sub):
                    key = (a.engine, id(a.buf), a.write)
                    if key not in seen:
                        seen.add(key)
                        yield a
            return
        for write, bufs in ((False, item.reads()), (True, item.writes())):
            for b in bufs:
                if not b.manual:
                    yield _Access(item.engine, b, write)

    def _needs(self, accesses: list[_Access], state: _State) -> list[tuple[Engine, Engine]]:
        need: list[tuple[Engine, Engine]] = []
        for a in accesses:
            for other in self._overlaps[id(a.buf)]:
                for (engine, wrote), when in state.last.get(other, {}).items():
                    if engine is a.engine or engine is Engine.CTL or not (wrote or a.write):
                        continue
                    if state.known.get((engine, a.engine), -1) < when and (engine, a.engine) not in need:
                        need.append((engine, a.engine))
        return need

    @staticmethod
    def _note(accesses: list[_Access], state: _State) -> None:
        for a in accesses:
            state.last.setdefault(id(a.buf), {})[(a.engine, a.write)] = state.now


@dataclass
class _Carried:
    """Pairs of engines that a loop's next iteration needs ordered; `start` is the last step of the first iteration."""

    start: int
    pairs: set[tuple[Engine, Engine]] = field(default_factory=set)


def _learn(state: _State, src: Engine, dst: Engine) -> None:
    """`dst` has waited for `src`: it knows all that `src` has done and what `src` itself has waited for."""
    state.known[(src, dst)] = state.now
    for other in Engine:
        known = state.known.get((other, src), -1)
        if known > state.known.get((other, dst), -1):
            state.known[(other, dst)] = known
    if dst is Engine.CTL:
        # whatever is dispatched from here on comes after it
        for engine in Engine:
            state.known[(src, engine)] = state.now


def _fence(pairs: Iterable[tuple[Engine, Engine]], node: int) -> Iterator[Instr]:
    for src, dst in pairs:
        sem = semaphore(src, dst)
        yield Instr(Op.SIGNAL, src, node, imm=(sem, 1))
        yield Instr(Op.WAIT, dst, node, imm=(sem, 1))


def _node_of(body: list[Node]) -> int:
    return body[-1].node if body else 0


def _overlaps(bufs: list[Buffer]) -> dict[int, list[int]]:
    """For each buffer the buffers of its memory that share a byte with it, itself among them."""
    out: dict[int, list[int]] = {}
    for a in bufs:
        lo, hi = a.base or 0, (a.base or 0) + a.nbytes
        out[id(a)] = [
            id(b) for b in bufs if b.space is a.space and (b.base or 0) < hi and lo < (b.base or 0) + b.nbytes
        ]
    return out
