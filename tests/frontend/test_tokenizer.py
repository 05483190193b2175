"""The tokenizer's part of the spec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Edit
from tokenizers import Tokenizer, models, processors
from tokenizers.models import Unigram

from calc.core.errors import ModelError
from calc.frontend.spec import load_spec


def write(model_dir: Path, size: int, added: dict[str, int] | None = None, *, bos: bool = False) -> None:
    """A word-level tokenizer of `size` words and added tokens at given ids."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="w1 $A", special_tokens=[("w1", 1)])
    data = json.loads(tokenizer.to_str())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    data["added_tokens"] = [{"id": i, "content": token, **flags} for token, i in (added or {}).items()]
    (model_dir / "tokenizer.json").write_text(json.dumps(data))


def refused(model_dir: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load_spec(model_dir)
    return caught.value


def test_tokenizer_is_read(llama: Path, edit: Edit) -> None:
    write(llama, 60, {"<end>": 63}, bos=True)
    edit(llama, "tokenizer_config.json", unk_token="w7", pad_token={"content": "w9"}, eos_token="<end>")
    spec = load_spec(llama)
    assert (spec.tokenizer.kind, spec.tokenizer.vocab_size, spec.tokenizer.add_bos) == ("tokenizers", 64, True)
    assert len(spec.tokenizer.sha256) == 64
    assert (spec.tokens.bos, spec.tokens.pad, spec.tokens.unk, spec.tokens.eos) == (1, 0, 7, (2, 63))
    write(llama, 60)
    assert not load_spec(llama).tokenizer.add_bos


def test_unigram_vocabulary(llama: Path) -> None:
    Tokenizer(Unigram([(f"w{i}", -1.0) for i in range(12)], unk_id=0)).save(str(llama / "tokenizer.json"))
    assert load_spec(llama).tokenizer.vocab_size == 12


def test_field_18_more_tokens_than_rows(llama: Path) -> None:
    write(llama, 70)
    error = refused(llama)
    assert error.codes == ("MODEL_TOKENIZER_TOO_LARGE",)
    assert error.problems[0].got == "ids up to 69"


def test_field_20_added_token_beyond_the_embedding(llama: Path, edit: Edit) -> None:
    write(llama, 64, {"<pad>": 64})
    error = refused(llama)
    assert error.codes == ("MODEL_TOKEN_ID_RANGE",)
    assert "<pad>" in error.problems[0].where
    write(llama, 64)
    edit(llama, "tokenizer_config.json", added_tokens_decoder={"65": {"content": "<x>"}})
    assert refused(llama).codes == ("MODEL_TOKEN_ID_RANGE",)
    (llama / "tokenizer_config.json").unlink()
    edit(llama, pad_token_id=64, eos_token_id=[2, 99])
    assert refused(llama).codes == ("MODEL_TOKEN_ID_RANGE", "MODEL_TOKEN_ID_RANGE")


def test_field_21_ids_need_not_be_contiguous(llama: Path) -> None:
    write(llama, 2, {"a": 2, "b": 60})
    assert load_spec(llama).tokenizer.vocab_size == 61


def test_field_58_ends_are_the_union_of_all_sources(llama: Path, edit: Edit) -> None:
    write(llama, 64)
    edit(llama, eos_token_id=[5, 3])
    edit(llama, "generation_config.json", eos_token_id=4)
    edit(llama, "tokenizer_config.json", eos_token="w9")
    assert load_spec(llama).tokens.eos == (3, 4, 5, 9)
    edit(llama, "generation_config.json", eos_token_id=[3, 11])
    assert load_spec(llama).tokens.eos == (3, 5, 9, 11)


@pytest.mark.parametrize(
    ("template", "want"),
    [
        ("{{ x }}", "{{ x }}"),
        ([{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "tool", "template": "t"}], None),
        (None, None),
    ],
)
def test_chat_template(llama: Path, edit: Edit, template: Any, want: str | None) -> None:
    edit(llama, "tokenizer_config.json", chat_template=template)
    assert load_spec(llama).tokenizer.chat_template == want
    (llama / "chat_template.jinja").write_text("{{ own file }}")
    assert load_spec(llama).tokenizer.chat_template == "{{ own file }}"
