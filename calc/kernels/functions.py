"""Kernels as model-local ONNX functions: what makes every intermediate graph run in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnx.parser

from calc.core.errors import InternalError
from calc.kernels.base import DOMAIN, Attr, Kernel, Numerics

OPSET = 25
"""Opset of the function bodies: the first with Attention's `left_window_size`."""


def function_proto(kernel: Kernel, attrs: Mapping[str, Attr], numerics: Numerics) -> onnx.FunctionProto:
    """The ONNX function of a kernel for the given attributes and numerics.

    Raises:
        InternalError: the body is not valid ONNX text.
    """
    ins, outs = kernel.formals(attrs)
    text = (
        f'<domain: "{DOMAIN}", overload: "{kernel.overload(attrs, numerics)}", opset_import: ["" : {OPSET}]>\n'
        f"{kernel.name} ({', '.join(ins)}) => ({', '.join(outs)}) {{\n{kernel.body(attrs, numerics)}\n}}"
    )
    try:
        return onnx.parser.parse_function(text)
    except onnx.parser.ParseError as e:
        raise InternalError(f"kernel {kernel.name}: {e}\n{text}") from e
