"""Canonical msgpack: the manifest's one encoding, and a strict decoder for hostile bytes.

Canonical means: map keys are strings in ascending order of their UTF-8 bytes; integers, strings, arrays and maps have
their shortest form; floats are 64-bit and finite; there is no binary, extension or 32-bit float value. So equal
manifests have equal bytes, and the decoder can refuse every other form.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable

import msgpack

from calc.calbin.layout import INT_MAX, MANIFEST_MAX_DEPTH, MANIFEST_MAX_VALUES
from calc.core.errors import FormatError, InternalError, Problem

Path = tuple[str | int, ...]
"""Where a value is in the manifest: keys and indices from the root."""

_INTS: dict[int, str] = {
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_LENGTHS: dict[int, tuple[str, str]] = {
    0xD9: ("str", ">B"),
    0xDA: ("str", ">H"),
    0xDB: ("str", ">I"),
    0xDC: ("array", ">H"),
    0xDD: ("array", ">I"),
    0xDE: ("map", ">H"),
    0xDF: ("map", ">I"),
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_HINT = "the manifest is damaged or was not written by calc: copy the file again or compile again"


def encode(value: object) -> bytes:
    """Canonical bytes of plain data: dicts with string keys, lists, tuples, strings, ints, floats, bools, None.

    Raises:
        InternalError: a value with no canonical form, such as NaN or an integer past 2**62.
    """
    packed: bytes = msgpack.packb(_sorted(value), use_bin_type=True)
    return packed


def _sorted(value: object) -> object:
    if isinstance(value, str) or value is None:
        return value
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise InternalError(f"a manifest key must be a string, not {key!r}")
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_sorted(item) for item in value]
    if isinstance(value, int):
        if not -INT_MAX <= value <= INT_MAX:
            raise InternalError(f"a manifest cannot hold the integer {value}")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InternalError(f"a manifest cannot hold {value}")
        return value
    raise InternalError(f"a manifest cannot hold a {type(value).__name__}")


def decode(raw: bytes, base: int = 0) -> object:
    """The value of msgpack bytes; arrays become tuples. Whether they are canonical is left to `check_canonical`.

    Memory and time are bounded by `raw`'s length and `MANIFEST_MAX_VALUES`, whatever counts the bytes declare.

    Args:
        raw: the bytes of exactly one value.
        base: offset of `raw` in its file, for messages.

    Raises:
        FormatError: CALBIN_MSGPACK_* with the offset of the first byte that is wrong.
    """
    decoder = _Decoder(raw, base)
    value = decoder.value(0)
    if decoder.pos != len(raw):
        got = f"{len(raw) - decoder.pos} more bytes"
        raise decoder.bad("TRAILING", "bytes follow the manifest's value", "the end", got)
    return value


def check_canonical(value: object, raw: bytes, base: int = 0) -> None:
    """Refuse bytes that are not the canonical encoding of the value they hold.

    Args:
        value: what `decode` made of `raw`.
        raw: the bytes.
        base: offset of `raw` in its file, for messages.

    Raises:
        FormatError: CALBIN_MSGPACK_CANONICAL with the offset of the first byte that differs.
    """
    again = encode(value)
    if again != raw:
        decoder = _Decoder(raw, base)
        at = next((i for i, (a, b) in enumerate(zip(raw, again, strict=False)) if a != b), min(len(raw), len(again)))
        decoder.pos = at
        what = "the encoding is not the canonical one"
        raise decoder.bad("CANONICAL", what, again[at : at + 8].hex(), raw[at : at + 8].hex())


def locate(raw: bytes, paths: Iterable[Path], base: int = 0) -> dict[Path, int]:
    """Offsets in the file of the values at `paths`; for a path that leads nowhere, of the last value on the way.

    Args:
        raw: bytes that `decode` accepts.
        paths: where to look.
        base: offset of `raw` in its file.
    """
    found: dict[Path, int] = {}
    decoder = _Decoder(raw, base)

    def visit(wanted: list[tuple[Path, Path]], depth: int) -> None:
        for whole, _ in wanted:
            found[whole] = base + decoder.pos
        nested = [(whole, rest) for whole, rest in wanted if rest]
        if not nested and depth == 0:
            return
        if not nested or raw[decoder.pos] not in _CONTAINERS:
            decoder.value(depth)
            return
        kind, count = decoder.head()
        for i in range(count):
            key: str | int = decoder.key() if kind == "map" else i
            visit_or_skip([(whole, rest[1:]) for whole, rest in nested if rest[0] == key], depth + 1)

    def visit_or_skip(wanted: list[tuple[Path, Path]], depth: int) -> None:
        if wanted:
            visit(wanted, depth)
        else:
            decoder.value(depth)

    visit([(path, path) for path in paths], 0)
    return found


_CONTAINERS = frozenset([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])


class _Decoder:
    """A cursor over the bytes."""

    def __init__(self, raw: bytes, base: int) -> None:
        self.raw = raw
        self.base = base
        self.pos = 0
        self.values = 0
        self.keys: dict[bytes, str] = {}

    def bad(self, code: str, what: str, expected: str = "", got: str = "") -> FormatError:
        return FormatError(
            Problem(f"CALBIN_MSGPACK_{code}", "manifest", what, expected, got, _HINT, offset=self.base + self.pos)
        )

    def take(self, count: int) -> bytes:
        end = self.pos + count
        if end > len(self.raw):
            raise self.bad(
                "LENGTH", "a value ends past the manifest's end", f"{count} bytes", f"{len(self.raw) - self.pos} bytes"
            )
        out = self.raw[self.pos : end]
        self.pos = end
        return out

    def number(self, fmt: str) -> int:
        (value,) = struct.unpack(fmt, self.take(struct.calcsize(fmt)))
        return int(value)

    def head(self) -> tuple[str, int]:
        """Kind and length of the string, array or map at the cursor; its length is checked against what is left."""
        start = self.pos
        first = self.take(1)[0]
        if first < 0x90:
            kind, count = "map", first & 0x0F
        elif first < 0xA0:
            kind, count = "array", first & 0x0F
        elif first < 0xC0:
            kind, count = "str", first & 0x1F
        else:
            kind, fmt = _LENGTHS[first]
            count = self.number(fmt)
        left = len(self.raw) - self.pos
        if count * (2 if kind == "map" else 1) > left:
            self.pos = start
            raise self.bad(
                "LENGTH", f"a {kind} claims more than the manifest holds", f"at most {left} bytes", str(count)
            )
        return kind, count

    def text(self, count: int) -> str:
        data = self.take(count)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as e:
            self.pos += e.start - count
            raise self.bad("UTF8", "a string is not UTF-8", "valid UTF-8", data[e.start : e.start + 4].hex()) from e

    def key(self) -> str:
        if self.pos >= len(self.raw) or not (0xA0 <= self.raw[self.pos] < 0xC0 or 0xD9 <= self.raw[self.pos] <= 0xDB):
            raise self.bad("KEY", "a map key is not a string")
        self.values += 1
        first = self.raw[self.pos]
        if first >= 0xC0:
            return self.text(self.head()[1])
        # Few keys occur many times: each is decoded once.
        packed = self.raw[self.pos : self.pos + first - 0x9F]
        known = self.keys.get(packed)
        if known is None:
            known = self.keys[packed] = self.text(self.head()[1])
        else:
            self.pos += len(packed)
        return known

    def value(self, depth: int) -> object:
        if self.pos >= len(self.raw):
            raise self.bad("LENGTH", "the manifest ends inside a value")
        self.values += 1
        if self.values > MANIFEST_MAX_VALUES:
            raise self.bad("VALUES", "the manifest has too many values", f"at most {MANIFEST_MAX_VALUES}")
        first = self.raw[self.pos]
        if first < 0x80 or first >= 0xE0:
            self.pos += 1
            return first if first < 0x80 else first - 0x100
        if first < 0xC0 or first in _LENGTHS:
            return self.nested(depth)
        if first in _CONSTANTS:
            self.pos += 1
            return _CONSTANTS[first]
        if first == 0xCB:
            return self.float64()
        if first not in _INTS:
            raise self.bad(
                "TYPE",
                "a value of a type the manifest never has",
                "nil, bool, int, float64, str, array or map",
                hex(first),
            )
        return self.integer(first)

    def nested(self, depth: int) -> object:
        start = self.pos
        kind, count = self.head()
        if kind == "str":
            return self.text(count)
        if depth >= MANIFEST_MAX_DEPTH:
            self.pos = start
            raise self.bad("DEPTH", "the manifest is nested too deeply", f"at most {MANIFEST_MAX_DEPTH} levels")
        if kind == "array":
            return tuple([self.value(depth + 1) for _ in range(count)])
        out: dict[str, object] = {}
        for _ in range(count):
            at = self.pos
            key = self.key()
            if key in out:
                self.pos = at
                raise self.bad("DUPLICATE", "a map has the same key twice", "unique keys", key[:80])
            out[key] = self.value(depth + 1)
        return out

    def integer(self, first: int) -> int:
        start = self.pos
        self.pos += 1
        value = self.number(_INTS[first])
        if abs(value) > INT_MAX:
            self.pos = start
            raise self.bad("INTEGER", "an integer is too large", f"at most 2**62 = {INT_MAX}", str(value))
        return value

    def float64(self) -> float:
        start = self.pos
        self.pos += 1
        (value,) = struct.unpack(">d", self.take(8))
        if not math.isfinite(value):
            self.pos = start
            raise self.bad("FLOAT", "a number is not finite", "a finite number", str(value))
        return float(value)
