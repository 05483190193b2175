"""From plain data to the manifest's models: types, ranges and unknown fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

from calc.calbin.codec import check_canonical, encode
from calc.calbin.layout import FORMAT, HINT
from calc.calbin.manifest import Manifest
from calc.calbin.report import Report
from calc.core.errors import InternalError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_BY_TYPE = {
    "extra_forbidden": ("CALBIN_UNKNOWN_FIELD", "a field this format version does not have"),
    "missing": ("CALBIN_MISSING_FIELD", "a required field is missing"),
    "literal_error": ("CALBIN_ENUM", "not one of the allowed words"),
    "greater_than": ("CALBIN_RANGE", "a number is out of range"),
    "greater_than_equal": ("CALBIN_RANGE", "a number is out of range"),
    "less_than_equal": ("CALBIN_RANGE", "a number is out of range"),
    "too_long": ("CALBIN_RANGE", "a list has too many elements"),
    "too_short": ("CALBIN_RANGE", "a list has too few elements"),
    "string_too_short": ("CALBIN_NAME", "a name is empty"),
    "string_too_long": ("CALBIN_NAME", "a name is too long"),
    "string_pattern_mismatch": ("CALBIN_PATTERN", "a text does not have the required form"),
}
_FIELD_CODES = {
    "workload": ("CALBIN_WORKLOAD", "a sub-model's workload is missing or zero (R2)"),
    "target_chips": ("CALBIN_TARGET_CHIPS", "a sub-model has no target chip (R3)"),
    "batch": ("CALBIN_BATCH", "a sub-model's batch is not positive"),
    "tile": ("CALBIN_TILE", "a tile is not a list of positive sizes"),
}
"""Fields whose range errors have a code of their own, by the name of the field or of what holds it."""

_LISTABLE = 10_000
"""Beyond this many wrong fields, describing each takes longer than a reader may."""

_RANGES = ("greater_than", "greater_than_equal", "too_short")


def to_manifest(value: object, raw: bytes, base: int, version: tuple[int, int], report: Report) -> Manifest:
    """The models of decoded `value`.

    A newer minor's unknown fields are dropped: what a reader must know to read right is in the header's feature bits.

    Args:
        value: what `decode` made of `raw`.
        raw: the manifest's bytes.
        base: their offset in the file.
        version: the header's version.
        report: takes the problems.

    Raises:
        FormatError: CALBIN_TYPE, CALBIN_UNKNOWN_FIELD, CALBIN_MISSING_FIELD, CALBIN_ENUM, CALBIN_RANGE, CALBIN_NAME,
            CALBIN_PATTERN, CALBIN_CANONICAL, CALBIN_FORMAT_FIELD, CALBIN_MSGPACK_CANONICAL and those of `_FIELD_CODES`.
    """
    manifest = _validate(value, report, newer=version > FORMAT)
    if manifest.format != version:
        what = "header and manifest name different format versions"
        report.add("CALBIN_FORMAT_FIELD", ("format",), what, expected=version, got=manifest.format, hint=HINT)
    elif version != FORMAT:
        check_canonical(value, raw, base)
    elif encode(manifest.model_dump()) != raw:
        check_canonical(value, raw, base)
        what = "the manifest is not what a writer makes of its own content"
        hint = "write every field, also those with a default, and floats as floats"
        report.add("CALBIN_CANONICAL", (), what, hint=hint)
    report.raise_if_any()
    return manifest


def _validate(value: object, report: Report, *, newer: bool) -> Manifest:
    try:
        return Manifest.model_validate(value, extra="ignore" if newer else "forbid")
    except ValidationError as e:
        _add_all(e, report)
    report.raise_if_any()
    raise InternalError("a manifest was refused without a problem")


def _add_all(error: ValidationError, report: Report) -> None:
    if error.error_count() > _LISTABLE:
        what = f"{error.error_count()} fields have the wrong type or range"
        report.add("CALBIN_TYPE", (), what, expected="the manifest of schemas/calbin-manifest.schema.json", hint=HINT)
        return
    for detail in error.errors(include_url=False, include_context=False):
        if report.full:
            break
        code, what = _code(detail)
        got = "nothing" if detail["type"] == "missing" else detail["input"]
        report.add(code, detail["loc"], what, expected=detail["msg"], got=got, hint=HINT)


def _code(detail: ErrorDetails) -> tuple[str, str]:
    loc, kind = detail["loc"], detail["type"]
    if loc[:1] == ("submodels",) or loc[:2] == ("kv", "tile"):
        for name in reversed([part for part in loc if isinstance(part, str)]):
            if name in _FIELD_CODES and kind in _RANGES:
                return _FIELD_CODES[name]
    return _BY_TYPE.get(kind, ("CALBIN_TYPE", "a value has the wrong type"))
