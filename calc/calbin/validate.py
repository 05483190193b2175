"""The one place that decides whether bytes are a calbin.

Cheap and fundamental checks come first, and each stage relies on those before it. A stage reports all that it finds.
No check allocates on the word of a declared count; none reads a shard unless `deep` asks for it.
"""

from __future__ import annotations

import hashlib

from calc.calbin.checks.content import check_golden, check_tokenizer
from calc.calbin.checks.deep import check_shards
from calc.calbin.checks.digests import check_section
from calc.calbin.checks.fields import to_manifest
from calc.calbin.checks.memory import check_dram, check_parts
from calc.calbin.checks.model import check_compatibility, check_states, check_submodels, check_target
from calc.calbin.checks.names import check_names, check_quantization, check_references
from calc.calbin.checks.placement import check_entries, check_sections, check_weights
from calc.calbin.checks.program import check_programs
from calc.calbin.codec import decode
from calc.calbin.layout import FIELD_OFFSETS, HEADER_BYTES, HINT, parse_header
from calc.calbin.manifest import Manifest
from calc.calbin.report import Context, Report
from calc.core.errors import FormatError, Problem


def validate(buf: memoryview, size: int, *, deep: bool) -> Manifest:
    """Check a calbin and answer its manifest.

    Args:
        buf: the file's bytes.
        size: how many there are.
        deep: also read the shards: their digests, scales and biases.

    Raises:
        FormatError: the file is damaged or breaks a rule; every problem has a code and an offset.
        VersionError: the file is sound as far as it was read, but needs another reader, runtime, driver or ISA.
    """
    header = parse_header(bytes(buf[: min(HEADER_BYTES, size)]), size)
    base = header.manifest_offset
    raw = bytes(buf[base : base + header.manifest_nbytes])
    digest = hashlib.sha256(raw).digest()
    if digest != header.manifest_sha256:
        what = "the manifest does not have the digest that the header names"
        at = FIELD_OFFSETS["manifest_sha256"]
        expected = header.manifest_sha256.hex()
        raise FormatError(Problem("CALBIN_MANIFEST_DIGEST", "manifest", what, expected, digest.hex(), HINT, at))

    report = Report(raw, base)
    ctx = Context(to_manifest(decode(raw, base), raw, base, header.version, report), report)
    check_compatibility(ctx)

    check_names(ctx)
    check_target(ctx)
    report.raise_if_any()
    check_sections(ctx, buf, header)
    check_references(ctx)
    report.raise_if_any()

    check_submodels(ctx)
    check_states(ctx)
    check_dram(ctx)
    check_parts(ctx)
    check_weights(ctx)
    check_quantization(ctx)
    check_golden(ctx)
    check_entries(ctx, buf)
    report.raise_if_any()

    _check_digests(ctx, buf, deep=deep)
    check_tokenizer(ctx, buf)
    check_programs(ctx, buf)
    report.raise_if_any()
    if deep:
        check_shards(ctx, buf)
        report.raise_if_any()
    return ctx.manifest


def _check_digests(ctx: Context, buf: memoryview, *, deep: bool) -> None:
    """Digests of all sections but shards; of those too when `deep`."""
    problems: list[Problem] = []
    for section in ctx.manifest.sections:
        if deep or section.kind != "weights":
            for _, found in check_section(buf, section):
                problems += found
    if problems:
        raise FormatError(problems)
