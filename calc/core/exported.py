"""`Exported`: a model as graphs and lazy weights, from whichever source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from calc.core.spec import ModelSpec
from calc.core.tensors import TensorRef
from calc.core.variant import Variant


@dataclass(frozen=True)
class Exported:
    """What the compiler starts from.

    Attributes:
        spec: the model.
        graphs: one per variant. Initializers of weights have no data but a reference into the checkpoint.
        weights: initializer name to lazy reference; the same for all variants, except for the RoPE tables' length.
        files: files a host needs (tokenizer, configs) by name.
    """

    spec: ModelSpec
    graphs: Mapping[Variant, ir.Model]
    weights: Mapping[str, TensorRef]
    files: Mapping[str, bytes] = field(default_factory=dict)
