"""Exported graphs → `.onnx` files that ONNX Runtime loads without a second copy of the weights.

ONNX Runtime reads external data only from files that really lie in the graph's own directory: neither a path that
leaves it nor a symbolic link out of it is accepted. The shards are therefore hard-linked next to the graphs (no bytes
are copied); where the file system cannot, they are copied. onnx's own checker refuses hard links as well: who needs it
asks for copies.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import onnx
import onnx_ir as ir

from calc.core.errors import DiskError, InternalError, Problem, UsageError
from calc.core.exported import Exported
from calc.core.tensors import FileTensor, ShapeOnlyTensor
from calc.core.variant import Variant

INLINE_LIMIT = 1 << 20
"""Float constants above this many bytes (RoPE tables of a long context) go into a file of their own."""

_MAX_PROTO = (1 << 31) - 1
_ALIGN = 4096


def save(
    exported: Exported, out_dir: Path, *, inline_limit: int = INLINE_LIMIT, copy: bool = False
) -> tuple[Path, ...]:
    """Write the graphs and ``model_spec.json``.

    Args:
        exported: from `export`.
        out_dir: made if it does not exist. A role with one variant is called ``prefill.onnx`` / ``decode.onnx``; of
            several variants each has its own name, e.g. ``prefill_b1_s128.onnx``.
        inline_limit: float constants above this many bytes are stored outside of the graph's protobuf. (Shapes and
            indices stay inside: a reader needs them to infer shapes.)
        copy: copy the weights instead of hard-linking them, for readers that refuse hard links.

    Returns:
        The files written, without the weight shards.

    Raises:
        UsageError: the export came from a config alone, there are no weights to refer to.
        DiskError: the directory cannot be written.
    """
    shapes = sorted(name for name, ref in exported.weights.items() if isinstance(ref, ShapeOnlyTensor))
    if shapes:
        raise UsageError(
            Problem(
                "USAGE_NO_WEIGHTS",
                str(out_dir),
                "the model was exported from a config alone: there are no weights to refer to",
                got=f"{len(shapes)} weights known by shape, e.g. {shapes[0]}",
                hint="export from a directory with a checkpoint",
            )
        )
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        paths = {ref.path for ref in exported.weights.values() if isinstance(ref, FileTensor)}
        shards = _place_shards(sorted(paths), out_dir, copy=copy)
        written = [
            _write_graph(graph, out_dir / f"{stem}.onnx", shards, inline_limit)
            for stem, graph in zip(_stems(exported.graphs), exported.graphs.values(), strict=True)
        ]
        spec = out_dir / "model_spec.json"
        _write(spec, (exported.spec.model_dump_json(indent=2) + "\n").encode())
    except OSError as error:
        raise DiskError(
            Problem("DISK_WRITE", str(error.filename or out_dir), "the file cannot be written", got=str(error))
        ) from error
    return (*written, spec)


def _stems(variants: Iterable[Variant]) -> list[str]:
    """File names without suffix, in order."""
    listed = list(variants)
    roles = Counter(v.role for v in listed)
    return [v.role if roles[v.role] == 1 else v.name for v in listed]


def _place_shards(shards: list[Path], out_dir: Path, *, copy: bool) -> dict[Path, str]:
    """Each shard → its name in `out_dir`, where it is put unless it lies there already."""
    names: dict[Path, str] = {}
    for i, shard in enumerate(shards):
        if shard.parent == out_dir.resolve():
            names[shard] = shard.name
            continue
        name = shard.name if shard.suffix == ".safetensors" else f"weights-{i:05d}.safetensors"
        if name in names.values():
            name = f"{i:05d}-{name}"
        target = out_dir / name
        if copy or not (target.exists() and target.samefile(shard)):
            target.unlink(missing_ok=True)
            _link_or_copy(shard, target, copy=copy)
        names[shard] = name
    return names


def _link_or_copy(source: Path, target: Path, *, copy: bool) -> None:
    if not copy:
        try:
            os.link(source, target)
        except OSError:  # another file system, or one without hard links
            pass
        else:
            return
    shutil.copyfile(source, target)


def _write_graph(model: ir.Model, path: Path, shards: dict[Path, str], inline_limit: int) -> Path:
    """Serialize one graph; its external references are rewritten to names inside the directory."""
    proto = ir.serde.serialize_model(model)
    values = model.graph.initializers
    blob = bytearray()
    side = path.with_suffix(".bin")
    for tensor in proto.graph.initializer:
        data = values[tensor.name].const_value
        if isinstance(data, ir.ExternalTensor):
            _refer(tensor, shards[Path(data.path)], data.offset or 0, data.nbytes)
        elif tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.raw_data) > inline_limit:
            blob.extend(b"\0" * (-len(blob) % _ALIGN))
            at, size = len(blob), len(tensor.raw_data)
            blob.extend(tensor.raw_data)
            tensor.ClearField("raw_data")
            _refer(tensor, side.name, at, size)
    if proto.ByteSize() > _MAX_PROTO:
        raise InternalError(f"{path.name}: a protobuf of {proto.ByteSize()} bytes cannot be read back")
    if blob:
        _write(side, bytes(blob))
    _write(path, proto.SerializeToString(deterministic=True))
    return path


def _refer(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    """Make `tensor` refer to bytes of the file `location`."""
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value


def _write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
