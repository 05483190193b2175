"""A safetensors checkpoint, indexed by its headers alone."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from calc.core.errors import ModelError, Problems
from calc.core.tensors import DTYPES, FileTensor
from calc.frontend.files import find, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER = 100_000_000  # the safetensors format's own limit
_DTYPES = {
    "F64": "f64",
    "F32": "f32",
    "F16": "f16",
    "BF16": "bf16",
    "F8_E4M3": "f8e4m3",
    "F8_E5M2": "f8e5m2",
    "I64": "i64",
    "I32": "i32",
    "I16": "i16",
    "I8": "i8",
    "U64": "u64",
    "U32": "u32",
    "U16": "u16",
    "U8": "u8",
    "BOOL": "bool",
}


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a model directory.

    Attributes:
        model_dir: the directory.
        tensors: checkpoint name → where its bytes are, in the order of the names.
        shards: the files, links resolved, in the order of their names.
    """

    model_dir: Path
    tensors: dict[str, FileTensor]
    shards: tuple[Path, ...]

    @classmethod
    def open(cls, model_dir: Path) -> Checkpoint:
        """Index the headers of every shard; no tensor data is read.

        Args:
            model_dir: a directory with ``config.json`` and a single or sharded safetensors checkpoint.

        Raises:
            ModelError: everything that is missing, contradictory or damaged, at once.
        """
        problems = Problems()
        if not model_dir.is_dir():
            problems.add(
                "MODEL_DIR_MISSING", str(model_dir), "there is no such directory", hint="check the path or the hub id"
            )
            problems.raise_if_any(ModelError)
        if find(model_dir, "config.json", problems) is None and not problems.items:
            problems.add("MODEL_CONFIG_MISSING", str(model_dir), "the directory has no config.json")
        tensors: dict[str, FileTensor] = {}
        shards: list[Path] = []
        names, weight_map = _shard_names(model_dir, problems)
        for name in names:
            path = find(model_dir, name, problems)
            if path is None:
                continue
            shards.append(path)
            found = read_header(path, name, problems)
            if found is None:
                continue
            if weight_map is not None:
                _compare_index(name, found, weight_map, problems)
            tensors.update(found)
        problems.raise_if_any(ModelError)
        return cls(model_dir, dict(sorted(tensors.items())), tuple(shards))


def has_weights(model_dir: Path) -> bool:
    """Whether the directory holds weights in any format (a bare config is exported from shapes alone)."""
    patterns = ("*.safetensors", INDEX, "*.bin", "*.bin.index.json", "*.pth", "*.gguf")
    return any(path for pattern in patterns for path in model_dir.glob(pattern))


def _shard_names(model_dir: Path, problems: Problems) -> tuple[list[str], dict[str, str] | None]:
    """The shard files' names and, for a sharded checkpoint, the index's tensor → shard map."""
    if find(model_dir, SINGLE, problems) is not None:
        return [SINGLE], None
    index = read_json(model_dir, INDEX, problems)
    if index is not None:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            problems.add("MODEL_INDEX_DAMAGED", INDEX, "the index has no weight_map of names to files")
            return [], None
        names = sorted(set(weight_map.values()))
        missing = [n for n in names if not (model_dir / n).is_file()]
        if missing:
            problems.add(
                "MODEL_SHARD_MISSING",
                INDEX,
                f"{len(missing)} of {len(names)} shard files are missing",
                expected=", ".join(names),
                got="missing: " + ", ".join(missing),
                hint="download the missing files again",
            )
        return [n for n in names if n not in missing], weight_map
    if problems.items:
        return [], None
    loose = sorted(p.name for p in model_dir.glob("*.safetensors"))
    pickles = sorted(p.name for pattern in ("*.bin", "*.pth") for p in model_dir.glob(pattern))
    if loose:
        problems.add(
            "MODEL_INDEX_MISSING",
            str(model_dir),
            f"there are shards but neither {SINGLE} nor {INDEX}",
            got=", ".join(loose),
            hint=f"download {INDEX} as well",
        )
    elif pickles:
        problems.add(
            "MODEL_PICKLE",
            str(model_dir),
            "the weights are pickles, which can run code when they are read",
            expected="safetensors",
            got=", ".join(pickles),
            hint="convert once: AutoModelForCausalLM.from_pretrained(dir).save_pretrained(new_dir)",
        )
    else:
        problems.add("MODEL_WEIGHTS_MISSING", str(model_dir), f"the directory has neither {SINGLE} nor {INDEX}")
    return [], None


def _compare_index(shard: str, found: dict[str, FileTensor], weight_map: dict[str, str], problems: Problems) -> None:
    """Index and shard must name the same tensors."""
    listed = {tensor for tensor, file in weight_map.items() if file == shard}
    remedy = f"the index is stale: download or save {INDEX} and its shards together"
    for tensor in sorted(listed - found.keys()):
        problems.add(
            "MODEL_INDEX_STALE", shard, f"the index places {tensor!r} in this shard, which lacks it", hint=remedy
        )
    for tensor in sorted(found.keys() - listed):
        problems.add(
            "MODEL_INDEX_STALE",
            shard,
            f"the shard holds {tensor!r}, which the index does not place here",
            got=weight_map.get(tensor, "not in the index"),
            hint=remedy,
        )


def read_header(path: Path, where: str, problems: Problems) -> dict[str, FileTensor] | None:
    """The tensors that a safetensors file declares, each checked against the file's size.

    Args:
        path: the file.
        where: its name in messages.
        problems: receives what is wrong.

    Returns:
        name → reference, None if the header cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            problems.add(
                "MODEL_HEADER_DAMAGED",
                where,
                "the safetensors header's length does not fit the file",
                expected=f"2..{max(size - 8, 0)} bytes",
                got=f"{length} bytes" if length >= 0 else f"a file of {size} bytes",
                hint="the file is truncated or no safetensors file (a Git LFS pointer?): download it again",
                offset=0,
            )
            return None
        raw = file.read(length)
    try:
        header = json.loads(raw.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        problems.add("MODEL_HEADER_DAMAGED", where, "the safetensors header is not JSON", got=error, offset=8)
        return None
    if not isinstance(header, dict):
        problems.add("MODEL_HEADER_DAMAGED", where, "the safetensors header is no object", offset=8)
        return None
    found: dict[str, FileTensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensor = _entry(path, where, name, entry, 8 + length, size, problems)
        if tensor is not None:
            found[name] = tensor
    _check_overlap(where, found, problems)
    return found


def _entry(
    path: Path, where: str, name: str, entry: object, base: int, size: int, problems: Problems
) -> FileTensor | None:
    """One header entry as a reference, None (and a problem) if it is not sound."""
    place = f"{where}:{name}"
    fields = entry if isinstance(entry, dict) else {}
    shape, span, dtype = fields.get("shape"), fields.get("data_offsets"), fields.get("dtype")
    if not (_naturals(shape) and _naturals(span) and len(span) == 2):
        problems.add("MODEL_HEADER_DAMAGED", place, "the entry lacks a valid shape or data_offsets", got=entry)
        return None
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        problems.add(
            "MODEL_DTYPE_UNSUPPORTED",
            place,
            "the tensor's dtype is not supported",
            expected=", ".join(_DTYPES),
            got=dtype,
        )
        return None
    begin, end = base + span[0], base + span[1]
    need = math.prod(shape) * DTYPES[_DTYPES[dtype]].itemsize
    if end > size or end - begin != need:
        problems.add(
            "MODEL_DATA_BOUNDS",
            place,
            "the tensor's bytes do not lie inside the file"
            if end > size
            else "the tensor's size contradicts its shape",
            expected=f"{need} bytes within {size}",
            got=f"bytes {begin}..{end}",
            hint="the file is truncated or damaged: download it again",
            offset=begin,
        )
        return None
    return FileTensor(path, begin, tuple(shape), _DTYPES[dtype], (name,))


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _check_overlap(where: str, found: dict[str, FileTensor], problems: Problems) -> None:
    """No two tensors of a shard may share bytes."""
    last_end, last_name = 0, ""
    for name, tensor in sorted(found.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.nbytes and tensor.offset < last_end:
            problems.add("MODEL_DATA_OVERLAP", f"{where}:{name}", f"the tensor's bytes overlap those of {last_name!r}")
        last_end, last_name = max(last_end, tensor.offset + tensor.nbytes), name
