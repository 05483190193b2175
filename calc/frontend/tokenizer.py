"""The tokenizer's files: what a host needs to build a prompt, and whether its ids fit the embedding."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from calc.core.errors import Problems
from calc.core.spec import SpecialTokens, TokenizerSpec
from calc.frontend.config import ModelConfig
from calc.frontend.files import JsonObject, find, read_json


@dataclass(frozen=True)
class Vocabulary:
    """Token → id, the base vocabulary and the added tokens apart."""

    base: dict[str, int]
    added: dict[str, int]

    def id_of(self, token: object) -> int | None:
        """The id of a token given as text or as ``{"content": text}``."""
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str):
            return None
        return self.added.get(text, self.base.get(text))


def read_tokenizer(
    model_dir: Path, config: ModelConfig, rows: int, problems: Problems
) -> tuple[TokenizerSpec, SpecialTokens]:
    """Read the tokenizer's files and check every id against the embedding.

    Args:
        model_dir: the model.
        config: its configuration, whose special tokens count too.
        rows: rows of the embedding, i.e. the ids there are.
        problems: receives ids out of range.
    """
    data = read_json(model_dir, "tokenizer.json", problems)
    settings = read_json(model_dir, "tokenizer_config.json", problems) or {}
    vocabulary = _vocabulary(data or {}, settings)
    _check_range(vocabulary, rows, problems)
    tokens = _special_tokens(config, settings, vocabulary)
    for role in ("bos", "pad", "unk"):
        _check_special(role, getattr(tokens, role), rows, problems)
    for token in tokens.eos:
        _check_special("eos", token, rows, problems)
    path = find(model_dir, "tokenizer.json", problems)
    if path is None or data is None:
        return TokenizerSpec(kind="none", chat_template=_chat_template(model_dir, settings, problems)), tokens
    spec = TokenizerSpec(
        kind="tokenizers",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        vocab_size=max((*vocabulary.base.values(), *vocabulary.added.values()), default=-1) + 1,
        add_bos=_adds_bos(path, tokens.bos),
        chat_template=_chat_template(model_dir, settings, problems),
    )
    return spec, tokens


def _vocabulary(data: JsonObject, settings: JsonObject) -> Vocabulary:
    model = data.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    base: dict[str, int] = {}
    if isinstance(vocab, dict):
        base = {str(k): int(v) for k, v in vocab.items()}
    elif isinstance(vocab, list):  # Unigram: [[token, score], ...]
        base = {str(entry[0]): i for i, entry in enumerate(vocab)}
    added: dict[str, int] = {}
    for entry in _entries(data.get("added_tokens")):
        added[str(entry.get("content"))] = _int(entry.get("id"))
    decoder = settings.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        for key, entry in decoder.items():
            if isinstance(entry, dict):
                added.setdefault(str(entry.get("content")), int(key))
    return Vocabulary(base, added)


def _entries(value: object) -> list[JsonObject]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _int(value: object) -> int:
    return value if isinstance(value, int) else -1


def _check_range(vocabulary: Vocabulary, rows: int, problems: Problems) -> None:
    """No id may lie beyond the embedding: it would read foreign memory. Ids need not be contiguous."""
    beyond = [i for i in vocabulary.base.values() if not 0 <= i < rows]
    if beyond:
        problems.add(
            "MODEL_TOKENIZER_TOO_LARGE",
            "tokenizer.json",
            f"{len(beyond)} tokens of the vocabulary have no row in the embedding",
            expected=f"ids below {rows}",
            got=f"ids up to {max(beyond)}",
            hint="tokenizer and checkpoint do not belong together, or the embedding was not resized",
        )
    for token, i in sorted(vocabulary.added.items()):
        if not 0 <= i < rows and token not in vocabulary.base:
            problems.add(
                "MODEL_TOKEN_ID_RANGE",
                f"added token {token!r}",
                "the token's id has no row in the embedding",
                expected=f"0..{rows - 1}",
                got=i,
                hint="resize the model's embedding, or remove the token",
            )


def _check_special(role: str, token: int | None, rows: int, problems: Problems) -> None:
    if token is not None and not 0 <= token < rows:
        problems.add(
            "MODEL_TOKEN_ID_RANGE",
            f"{role} token",
            "the token's id has no row in the embedding",
            expected=f"0..{rows - 1}",
            got=token,
        )


def _ids(value: object) -> Iterable[int]:
    """The ids in a config field: absent, one, or a list. Negative ones mean none in some old configs."""
    values = value if isinstance(value, list) else [value]
    return [v for v in values if type(v) is int and v >= 0]


def _special_tokens(config: ModelConfig, settings: JsonObject, vocabulary: Vocabulary) -> SpecialTokens:
    """Ids from config, generation config and tokenizer; the ends of sequence are the union of all three."""
    sources = (config.raw, config.generation)

    def one(role: str) -> int | None:
        found = [i for source in sources for i in _ids(source.get(f"{role}_token_id"))]
        return found[0] if found else vocabulary.id_of(settings.get(f"{role}_token"))

    eos = {i for source in sources for i in _ids(source.get("eos_token_id"))}
    own = vocabulary.id_of(settings.get("eos_token"))
    return SpecialTokens(
        bos=one("bos"),
        eos=tuple(sorted(eos if own is None else eos | {own})),
        pad=one("pad"),
        unk=vocabulary.id_of(settings.get("unk_token")),
    )


def _adds_bos(path: Path, bos: int | None) -> bool:
    """Whether the tokenizer itself puts the begin-of-sequence token first."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(path)).encode("", add_special_tokens=True).ids
    return bos is not None and bool(ids) and ids[0] == bos


def _chat_template(model_dir: Path, settings: JsonObject, problems: Problems) -> str | None:
    """The template, from its own file or the tokenizer's settings (of several, the one called default)."""
    path = find(model_dir, "chat_template.jinja", problems)
    if path is not None:
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, str):
        return template
    named = {entry.get("name"): entry.get("template") for entry in _entries(template)}
    default = named.get("default")
    return default if isinstance(default, str) else None
