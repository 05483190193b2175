"""Named generators of what a calbin reader must refuse: each damages a valid tiny calbin in one place.

A case's name starts with its number in the project's list of malformed inputs.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

from calbin_tiny import Parts, assemble

from calc.core.errors import CalcError, FormatError


@dataclass(frozen=True)
class Case:
    """`damage` makes the bytes; reading them raises `kind` whose problems include `code`."""

    name: str
    code: str
    damage: Callable[[Parts], bytes]
    kind: type[CalcError] = FormatError
    deep: bool = False
    chips: int = 1


CASES: list[Case] = []
_STEP = re.compile(r"\.?(\w+)|\[(-?\d+)\]")


def set_at(manifest: dict, path: str, value: object) -> None:
    """Set ``submodels[0].batch`` and the like; tuples on the way become lists."""
    keys = [m[1] if m[1] is not None else int(m[2]) for m in _STEP.finditer(path)]
    node = manifest
    for key in keys[:-1]:
        if isinstance(node[key], tuple):
            node[key] = list(node[key])
        node = node[key]
    node[keys[-1]] = value


def get_at(manifest: dict, path: str) -> object:
    node: object = manifest
    for m in _STEP.finditer(path):
        node = node[m[1] if m[1] is not None else int(m[2])]
    return node


def damaged(name: str, code: str, **more):
    """Register a generator of bytes."""

    def register(function):
        CASES.append(Case(name, code, function, **more))
        return function

    return register


def edited(name: str, code: str, **more):
    """Register a generator that changes the complete manifest; digests are made right again."""

    def register(function):
        CASES.append(Case(name, code, lambda parts: assemble(parts, edit=function), **more))
        return function

    return register


def field(name: str, code: str, path: str, *values: object, **more) -> None:
    """Register one case per value that a field must not have."""
    for i, value in enumerate(values):
        suffix = f" #{i + 1}" if len(values) > 1 else ""

        def edit(m: dict, value: object = value) -> None:
            set_at(m, path, value)

        CASES.append(Case(f"{name}: {path}{suffix}", code, lambda p, edit=edit: assemble(p, edit=edit), **more))


def header_bytes(name: str, code: str, offset: int, *values: bytes, **more) -> None:
    """Register one case per value of some header bytes."""
    for i, value in enumerate(values):
        suffix = f" #{i + 1}" if len(values) > 1 else ""

        def damage(parts: Parts, value: bytes = value) -> bytes:
            data = bytearray(assemble(parts))
            data[offset : offset + len(value)] = value
            return bytes(data)

        CASES.append(Case(f"{name}{suffix}", code, damage, **more))


def u16(*values: int) -> list[bytes]:
    return [struct.pack("<H", v) for v in values]


def u32(*values: int) -> list[bytes]:
    return [struct.pack("<I", v) for v in values]


def u64(*values: int) -> list[bytes]:
    return [struct.pack("<Q", v) for v in values]
