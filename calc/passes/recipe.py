"""Recipe: which scheme each weight gets.

A recipe is a scheme's name or a TOML file::

    default = "w4a16"
    group = 64                       # values along K that share a scale: 32, 64 or 128

    [[override]]
    match = "*.self_attn.*"          # shell pattern on the weight's name; the last match wins
    scheme = "w8a8"

Embedding tables, lm_head and routers stay bf16 unless an override names them (R22); a table that is looked up by row
is always bf16.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from calc.core.errors import Problem, Problems, UsageError
from calc.core.schemes import Scheme, scheme, schemes
from calc.core.spec import Frozen, one_of
from calc.kernels import registry
from calc.kernels.base import Call

Name = Annotated[str, one_of(schemes)]
Group = Literal[32, 64, 128]


class Override(Frozen):
    """A pattern on weight names and the scheme of what it matches."""

    match: str
    scheme: Name
    group: Group | None = None


class Recipe(Frozen):
    """A default scheme and its exceptions."""

    default: Name
    group: Group = 64
    override: tuple[Override, ...] = Field(default=(), strict=False)


def load_recipe(text: str) -> Recipe:
    """A recipe by scheme name or TOML path.

    Raises:
        UsageError: RECIPE_UNKNOWN, RECIPE_INVALID (one problem per field).
    """
    if text in schemes():
        return Recipe.model_validate({"default": text})
    path = Path(text)
    if not path.is_file():
        raise UsageError(
            Problem(
                "RECIPE_UNKNOWN", text, "no such scheme or recipe", f"{', '.join(schemes())} or the path of a .toml"
            )
        )
    try:
        return Recipe.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise UsageError(Problem("RECIPE_INVALID", text, "not valid TOML", got=str(e))) from e
    except ValidationError as e:
        raise UsageError(
            [
                Problem("RECIPE_INVALID", f"{text}: {'.'.join(map(str, x['loc']))}", x["msg"], got=str(x["input"])[:80])
                for x in e.errors()
            ]
        ) from e


def assign(recipe: Recipe, calls: Sequence[Call]) -> dict[str, Scheme]:
    """The scheme of every matrix weight, by its name.

    Raises:
        UsageError: RECIPE_NO_MATCH for each override that matches no weight, RECIPE_TABLE where one would quantize a
            table that is looked up by row, RECIPE_PAIR where gate and up of one unit differ.
    """
    tables, tender, matrices = set[str](), set[str](), dict[str, None]()
    for call in calls:
        for formal in registry()[call.op].weights(call.attrs):
            name = call.inputs[formal]
            matrices[name] = None
            if call.op == "Embed":
                tables.add(name)
            if call.op in ("Embed", "LmHead") or formal == "router":
                tender.add(name)
    out: dict[str, Scheme] = {}
    unused = set(range(len(recipe.override)))
    problems = Problems()
    for name in matrices:
        chosen, group = ("bf16" if name in tender else recipe.default), recipe.group
        for i, o in enumerate(recipe.override):
            if fnmatchcase(name, o.match):
                chosen, group = o.scheme, o.group or recipe.group
                unused.discard(i)
        if name in tables and chosen != "bf16":
            problems.add(
                "RECIPE_TABLE", name, "a table that is looked up by row must be bf16", expected="bf16", got=chosen
            )
        out[name] = scheme(chosen, group)
    for call in calls:
        names = {f: call.inputs[f] for f in ("gate", "up") if f in call.inputs}
        if len({out[n] for n in names.values()}) > 1:
            problems.add(
                "RECIPE_PAIR",
                " and ".join(names.values()),
                "gate and up are multiplied tile by tile and need one scheme and group",
                got=", ".join(str(out[n]) for n in names.values()),
                hint="let one pattern match both",
            )
    for i in sorted(unused):
        problems.add(
            "RECIPE_NO_MATCH",
            f"override {i}",
            "matches no weight",
            got=recipe.override[i].match,
            hint="see the names in `calc inventory`",
        )
    problems.raise_if_any(UsageError)
    return out


def bits(schemes: Mapping[str, Scheme]) -> str:
    """The schemes in use, for a one-line summary."""
    return "+".join(sorted({s.name for s in schemes.values()}))
