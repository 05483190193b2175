"""Quantization schemes, one per file. The registry is the sorted directory."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache

from calc.core.schemes.base import Scheme, UnknownSchemeError

__all__ = ["Scheme", "UnknownSchemeError", "parse", "scheme", "schemes"]

_SHARED = frozenset({"base"})


@cache
def schemes() -> dict[str, type[Scheme]]:
    """Every scheme by name, in the order of the directory."""
    out: dict[str, type[Scheme]] = {}
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        if info.name in _SHARED:
            continue
        module = importlib.import_module(f"{__name__}.{info.name}")
        for _, cls in sorted(inspect.getmembers(module, inspect.isclass)):
            if issubclass(cls, Scheme) and cls.__module__ == module.__name__:
                out[cls.name] = cls
    return out


def scheme(name: str, group: int = 0) -> Scheme:
    """The scheme of a name.

    Args:
        name: as registered.
        group: values per scale along K; a scheme without groups does not use it.

    Raises:
        UnknownSchemeError: no such scheme.
        InternalError: a group size the scheme's format does not have.
    """
    try:
        cls = schemes()[name]
    except KeyError as e:
        raise UnknownSchemeError(f"no scheme {name!r}: {', '.join(schemes())}") from e
    return cls(group if cls.format.per == "group" else 0)


def parse(text: str) -> Scheme:
    """The scheme of its text, ``str(scheme)``: the name, and after a slash the group size where it has one.

    Raises:
        UnknownSchemeError: no scheme has this text.
    """
    name = text.partition("/")[0]
    if name in schemes():
        cls = schemes()[name]
        for value in map(cls, cls.format.groups):
            if str(value) == text:
                return value
    raise UnknownSchemeError(f"no scheme {text!r}: {', '.join(schemes())}, with /GROUP where it has groups")
