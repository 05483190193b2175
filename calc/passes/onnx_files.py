"""Graphs from ONNX files: what `calc export` wrote, or graphs made by other means in the same form.

The form: semantic names (``input_ids``, ``past_kv.<i>.key``, ``logits``, ``kv.<i>.key``), static shapes, standard ops.
Weights are the float initializers with more than one element; external ones are referenced where they lie.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx_ir.passes.common import LiftConstantsToInitializersPass, ShapeInferencePass
from pydantic import ValidationError

from calc.core.errors import DiskError, ModelError, Problem, Problems
from calc.core.exported import Exported
from calc.core.roles import is_state_input, layer_of
from calc.core.spec import ModelSpec, TokenizerSpec
from calc.core.tensors import ArrayTensor, FileTensor, TensorRef
from calc.core.variant import Variant
from calc.passes.base import Graph

DTYPES = {
    ir.DataType.FLOAT: "f32",
    ir.DataType.FLOAT16: "f16",
    ir.DataType.BFLOAT16: "bf16",
    ir.DataType.DOUBLE: "f64",
}


HOST_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "config.json")
"""Files of a model directory that travel in the artefact."""


def host_files(directory: Path) -> dict[str, bytes]:
    """The files of a directory that a host needs."""
    return {n: (directory / n).read_bytes() for n in HOST_FILES if (directory / n).is_file()}


def load_graph(path: Path) -> Graph:
    """Read an ONNX file; weights become lazy references.

    Raises:
        ModelError: ONNX_UNREADABLE.
    """
    try:
        model = ir.load(path, format="protobuf")
    except (OSError, DecodeError, ValueError) as e:
        raise ModelError(Problem("ONNX_UNREADABLE", str(path), "not a readable ONNX file", got=str(e))) from e
    for i, node in enumerate(model.graph):
        node.name = node.name or f"{node.op_type}.{i}"  # the passes name what they make after it
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    if any(v.shape is None for n in model.graph for v in n.outputs):
        ShapeInferencePass()(model)
    weights: dict[str, TensorRef] = {}
    for name, value in model.graph.initializers.items():
        t = value.const_value
        if t is None or t.dtype not in DTYPES or t.size <= 1:
            continue
        shape = tuple(int(d) for d in t.shape)  # type: ignore[arg-type]
        if isinstance(t, ir.ExternalTensor):
            weights[name] = FileTensor(Path(t.path), t.offset or 0, shape, DTYPES[t.dtype], (name,))
        else:
            weights[name] = ArrayTensor(np.asarray(t.numpy()), (name,))
    _infer_layers(model)
    return Graph(model, weights)


def without_weights(g: Graph) -> bytes:
    """The graph as an ONNX file whose weights are inputs, the same bytes on every run.

    It opens in any viewer, and runs in ONNX Runtime once the weights are fed.
    """
    with _quiet("onnx_ir"):  # it warns of every initializer without data; ours have none on purpose
        proto = ir.serde.serialize_model(g.model)
    inits = {t.name: t for t in proto.graph.initializer}
    missing = {i.name for i in proto.graph.input}
    for name, value in g.model.graph.initializers.items():
        if name in g.weights and name not in missing:
            elem = (value.dtype or ir.DataType.FLOAT).value
            proto.graph.input.append(onnx.helper.make_tensor_value_info(name, elem, list(g.weights[name].shape)))
            inits.pop(name, None)
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(inits.values())
    return bytes(proto.SerializeToString(deterministic=True))


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Errors only from a library's logger, for the time being."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write small files into a directory that is made if missing.

    Raises:
        DiskError: DISK_WRITE.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (directory / name).write_bytes(data)
    except OSError as e:
        raise DiskError(Problem("DISK_WRITE", str(directory), "cannot write", got=str(e))) from e


def load_exported(paths: Sequence[Path], spec: Path) -> Exported:
    """Read graphs and their ``model_spec.json``.

    Raises:
        ModelError: ONNX_UNREADABLE, ONNX_INPUTS for a graph without the semantic inputs, SPEC_INVALID.
    """
    try:
        model_spec = ModelSpec.model_validate_json(spec.read_text(encoding="utf-8"), strict=True)
    except (OSError, UnicodeDecodeError, ValidationError) as e:
        raise ModelError(Problem("SPEC_INVALID", str(spec), "not a readable model_spec.json", got=str(e)[:500])) from e
    graphs: dict[Variant, ir.Model] = {}
    weights: dict[str, TensorRef] = {}
    problems = Problems()
    for path in paths:
        g = load_graph(path)
        ids = next((v for v in g.model.graph.inputs if v.name == "input_ids"), None)
        if ids is None or ids.shape is None or len(ids.shape) != 2 or any(not isinstance(d, int) for d in ids.shape):
            problems.add(
                "ONNX_INPUTS",
                str(path),
                "the graph lacks a static input_ids [batch, sequence]",
                expected="input_ids, past_kv_cur_seq_len, cur_seq_len, past_kv.<layer>.key and .value",
                got=", ".join(v.name or "?" for v in g.model.graph.inputs)[:200],
                hint="`calc export` shows the form",
            )
            continue
        batch, seq = (int(d) for d in ids.shape)  # type: ignore[arg-type]
        variant = Variant("decode" if seq == 1 else "prefill", batch, seq)
        if variant in graphs:
            problems.add(
                "ONNX_INPUTS", str(path), "a second graph of one shape", got=variant.name, hint="give each once"
            )
        graphs[variant] = g.model
        for name, ref in g.weights.items():
            if name in weights and not name.startswith("rope.") and not _same(weights[name], ref):
                what = "an initializer of this name in another graph is a different weight"
                problems.add(
                    "ONNX_INPUTS", f"{path}: {name}", what, hint="weights shared by graphs need one name, others two"
                )
        weights.update(g.weights)
    problems.raise_if_any(ModelError)
    files = host_files(spec.parent)
    if "tokenizer.json" not in files:
        # without the tokenizer beside it the artefact takes token ids only
        model_spec = model_spec.model_copy(update={"tokenizer": TokenizerSpec(kind="none")})
    return Exported(model_spec, graphs, weights, files)


def _same(a: TensorRef, b: TensorRef) -> bool:
    """Whether two references mean the same data: the same place in a file, or equal arrays."""
    if isinstance(a, ArrayTensor) and isinstance(b, ArrayTensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(np.array_equal(a.array, b.array))
    return a == b if not isinstance(a, ArrayTensor) and not isinstance(b, ArrayTensor) else False


def _infer_layers(model: ir.Model) -> None:
    """Where a graph does not say which layer a node is in: the last one whose states its inputs come from."""
    if any("calc.layer" in n.metadata_props for n in model.graph):
        return
    layer: dict[int, int] = {}
    for node in model.graph:
        own = [
            layer_of(v.name)
            for v in node.inputs
            if v is not None and v.name and v.is_graph_input() and is_state_input(v.name)
        ]
        before = [
            layer[id(p)] for v in node.inputs if v is not None and (p := v.producer()) is not None and id(p) in layer
        ]
        if own or before:
            layer[id(node)] = max(own + before)
            node.metadata_props["calc.layer"] = str(layer[id(node)])
