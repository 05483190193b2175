"""Fetch English Wikipedia text for accuracy measurements.

gensim's wheel carries an excerpt of a Wikipedia dump (CC BY-SA) as test data. The articles' prose, without markup,
tables and references, goes to ``.cache/texts/enwiki.txt``; it is not part of the repository.

    python scripts/fetch_texts.py [OUT_DIR] [--limit BYTES]        # default: .cache/texts, 400,000 bytes
"""

from __future__ import annotations

import argparse
import bz2
import html
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import _assets

DUMP = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
GENSIM = _assets.Package(
    "gensim",
    "4.4.0",
    {DUMP: "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d"},
)
LIMIT = 400_000
SHORTEST = 200  # characters: anything below is a redirect or a stub that became empty

INNERMOST_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
INNERMOST_TABLE = re.compile(r"\{\|(?:(?!\{\|).)*?\|\}", re.DOTALL)
INNERMOST_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
DROPPED = re.compile(
    r"<!--.*?-->|<ref[^>]*/>|<(ref|math|gallery|table|timeline|source|code|pre)\b[^>]*>.*?</\1>",
    re.DOTALL | re.IGNORECASE,
)
TAG = re.compile(r"<[^>]+>")
WEB_LINK = re.compile(r"\[https?://\S+ ?([^\]]*)\]")
EMPHASIS = re.compile(r"'{2,}")
APPENDIX = re.compile(
    r"^=+\s*(?:see also|references|external links|notes|footnotes|further reading|bibliography|sources)\s*=+\s*$",
    re.MULTILINE | re.IGNORECASE,
)
HEADING = re.compile(r"^=+\s*(.*?)\s*=+\s*$", re.MULTILINE)
LIST_MARK = re.compile(r"^[*#:;]+\s*")
EMPTY_PARENTHESES = re.compile(r"\s*\([\s,;]*\)")
# What a dropped template leaves: doubled spaces, and a space before a punctuation mark.
HOLE = re.compile(r"[ \t]+(?=[ \t]|[,.;:)])")


def replace_until_stable(pattern: re.Pattern[str], replacement: object, text: str) -> str:
    """Apply an innermost-first substitution until nothing is left to replace."""
    count = 1
    while count:
        text, count = pattern.subn(replacement, text)
    return text


def link_text(match: re.Match[str]) -> str:
    """What a reader sees of ``[[target|text]]``; nothing of files, categories and other namespaces."""
    target, _, shown = match[1].partition("|")
    if ":" in target.lstrip(":"):
        return ""
    return shown.rpartition("|")[2] or target.lstrip(":")


def prose(markup: str) -> str:
    """The text of an article without its wiki markup, one paragraph per line."""
    text = APPENDIX.split(html.unescape(markup), maxsplit=1)[0]
    text = DROPPED.sub("", text)
    text = replace_until_stable(INNERMOST_TEMPLATE, "", text)
    text = replace_until_stable(INNERMOST_TABLE, "", text)
    text = replace_until_stable(INNERMOST_LINK, link_text, text)
    text = text.replace("\u00a0", " ")
    for pattern, replacement in ((WEB_LINK, r"\1"), (TAG, ""), (EMPHASIS, ""), (HEADING, r"\1")):
        text = pattern.sub(replacement, text)
    text = HOLE.sub("", EMPTY_PARENTHESES.sub("", text))
    lines = (LIST_MARK.sub("", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith(("|", "!", "{", "}")))


def articles(dump: bytes) -> Iterator[tuple[str, str]]:
    """Titles and prose of the dump's articles, in its order."""
    space = re.search(rb'xmlns="([^"]+)"', dump)
    prefix = f"{{{space[1].decode()}}}" if space else ""
    for page in ElementTree.fromstring(dump).iter(f"{prefix}page"):
        title = page.findtext(f"{prefix}title", "")
        markup = page.findtext(f"{prefix}revision/{prefix}text", "")
        if ":" in title or markup.lower().startswith("#redirect"):
            continue
        if len(text := prose(markup)) >= SHORTEST:
            yield title, text


def fetch(out: Path, cache: Path, limit: int) -> Path:
    """Write ``enwiki.txt``, whole articles up to `limit` bytes, and return its path."""
    origin = {"package": GENSIM.requirement, "sha256": GENSIM.digests[DUMP], "limit": str(limit), "writer": "1"}
    if _assets.is_current(out, origin):
        return out / "enwiki.txt"
    dump = bz2.decompress((GENSIM.extract(cache) / DUMP).read_bytes())
    kept: list[str] = []
    size = 0
    for title, text in articles(dump):
        article = f"{title}\n\n{text}\n\n"
        size += len(article.encode())
        if size > limit:
            break
        kept.append(article)
    with _assets.published(out) as scratch:
        (scratch / "enwiki.txt").write_text("".join(kept), encoding="utf-8")
        (scratch / "LICENSE").write_text(
            "enwiki.txt: text of the English Wikipedia's contributors, CC BY-SA, shortened and without markup.\n",
            encoding="utf-8",
        )
        _assets.write_record(scratch, origin)
    return out / "enwiki.txt"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=_assets.CACHE / "texts")
    parser.add_argument("--cache", type=Path, default=_assets.CACHE, help="where the downloaded package is kept")
    parser.add_argument("--limit", type=int, default=LIMIT, help="bytes of text")
    options = parser.parse_args()
    try:
        path = fetch(options.out, options.cache, options.limit)
    except (_assets.AssetError, ElementTree.ParseError) as error:
        sys.exit(f"fetch_texts: {error}")
    _assets.console.print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
