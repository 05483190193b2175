"""Weights as lazy references: a file, an offset, and the recipe of what is done to the bytes.

A tensor's bytes exist in memory only while somebody reads them; `rows` reads a range of the first axis without
touching the rest, so that peak memory is bounded by a tile, never by the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from calc.core.errors import InternalError, ModelError, Problem

DTYPES: dict[str, np.dtype[np.generic]] = {
    "f64": np.dtype(np.float64),
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f8e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "i64": np.dtype(np.int64),
    "i32": np.dtype(np.int32),
    "i16": np.dtype(np.int16),
    "i8": np.dtype(np.int8),
    "u64": np.dtype(np.uint64),
    "u32": np.dtype(np.uint32),
    "u16": np.dtype(np.uint16),
    "u8": np.dtype(np.uint8),
    "bool": np.dtype(np.bool_),
}
"""calc's dtype names and their numpy form (little endian on disk)."""


class TensorRef(ABC):
    """A tensor that is read on demand.

    Attributes:
        shape: dimensions.
        dtype: a key of `DTYPES`, the dtype in which `read` answers.
        sources: names of the checkpoint tensors the bytes come from, in order.
    """

    shape: tuple[int, ...]
    dtype: str
    sources: tuple[str, ...]

    @abstractmethod
    def rows(self, start: int, stop: int) -> NDArray[np.generic]:
        """Rows ``start:stop`` of axis 0, in `dtype`, shape ``(stop - start, *shape[1:])``."""

    def read(self) -> NDArray[np.generic]:
        """The whole tensor. For a scalar, shape ``()``."""
        if not self.shape:
            raise InternalError(f"{self.sources}: a scalar reference must override read()")
        return self.rows(0, self.shape[0])

    @property
    def nbytes(self) -> int:
        """Size of the tensor in `dtype`, in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class FileTensor(TensorRef):
    """A contiguous row-major tensor inside a file (one tensor of a safetensors shard)."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[str, ...]

    def rows(self, start: int, stop: int) -> NDArray[np.generic]:
        dt = DTYPES[self.dtype]
        inner = int(np.prod(self.shape[1:], dtype=np.int64))
        flat = self._values(self.offset + start * inner * dt.itemsize, (stop - start) * inner)
        return flat.reshape(stop - start, *self.shape[1:])

    def read(self) -> NDArray[np.generic]:
        if self.shape:
            return self.rows(0, self.shape[0])
        return self._values(self.offset, 1).reshape(())

    def _values(self, offset: int, count: int) -> NDArray[np.generic]:
        """Values from a byte of the file on.

        Raises:
            ModelError: MODEL_UNREADABLE when the file is gone or has become shorter since it was checked.
        """
        try:
            flat = np.fromfile(self.path, dtype=DTYPES[self.dtype], count=count, offset=offset)
        except OSError as e:
            raise self._unreadable(e.strerror or str(e)) from e
        if flat.size != count:
            raise self._unreadable(f"{flat.size} of {count} values from byte {offset} on")
        return flat

    def _unreadable(self, got: str) -> ModelError:
        return ModelError(
            Problem(
                "MODEL_UNREADABLE",
                f"{self.path}: {', '.join(self.sources)}",
                "the tensor cannot be read any more",
                got=got,
                hint="did something change the checkpoint meanwhile?",
            )
        )


@dataclass(frozen=True)
class ArrayTensor(TensorRef):
    """A small tensor that is held in memory (RoPE tables, constants)."""

    array: NDArray[np.generic]
    sources: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.array.shape

    @property
    def dtype(self) -> str:  # type: ignore[override]
        return next(k for k, v in DTYPES.items() if v == self.array.dtype)

    def rows(self, start: int, stop: int) -> NDArray[np.generic]:
        return self.array[start:stop]

    def read(self) -> NDArray[np.generic]:
        return self.array


@dataclass(frozen=True)
class ConcatTensor(TensorRef):
    """Parts joined on axis 0 (merged gate/up, fused QKV)."""

    parts: tuple[TensorRef, ...]

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (sum(p.shape[0] for p in self.parts), *self.parts[0].shape[1:])

    @property
    def dtype(self) -> str:  # type: ignore[override]
        return self.parts[0].dtype

    @property
    def sources(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(s for p in self.parts for s in p.sources)

    def rows(self, start: int, stop: int) -> NDArray[np.generic]:
        out, base = [], 0
        for p in self.parts:
            a, b = max(start - base, 0), min(stop - base, p.shape[0])
            if a < b:
                out.append(p.rows(a, b))
            base += p.shape[0]
        return out[0] if len(out) == 1 else np.concatenate(out)


@dataclass(frozen=True)
class StackTensor(TensorRef):
    """Parts of one shape stacked on a new axis 0 (experts kept one by one); `parts[e]` is expert e."""

    parts: tuple[TensorRef, ...]

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (len(self.parts), *self.parts[0].shape)

    @property
    def dtype(self) -> str:  # type: ignore[override]
        return self.parts[0].dtype

    @property
    def sources(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(s for p in self.parts for s in p.sources)

    def rows(self, start: int, stop: int) -> NDArray[np.generic]:
        return np.stack([p.read() for p in self.parts[start:stop]])


@dataclass(frozen=True)
class RowsTensor(TensorRef):
    """Rows ``start:stop`` of another reference (one expert of a merged 3-D tensor is `SelectTensor`)."""

    base: TensorRef
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.stop - self.start, *self.base.shape[1:])

    @property
    def dtype(self) -> str:  # type: ignore[override]
        return self.base.dtype

    @property
    def sources(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.base.sources

    def rows(self, start: int, stop: int) -> NDArray[np.generic]:
        return self.base.rows(self.start + start, self.start + stop)


@dataclass(frozen=True)
class ColumnsTensor(TensorRef):
    """Columns ``start:stop`` of the last axis of another reference (a chip's share of a weight's input channels)."""

    base: TensorRef
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (*self.base.shape[:-1], self.stop - self.start)

    @property
    def dtype(self) -> str:  # type: ignore[override]
        return self.base.dtype

    @property
    def sources(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.base.sources

    def rows(self, start: int, stop: int) -> NDArray[np.generic]:
        return np.ascontiguousarray(self.base.rows(start, stop)[..., self.start : self.stop])


@dataclass(frozen=True)
class SelectTensor(TensorRef):
    """Element `index` of axis 0 of another reference, that axis dropped."""

    base: TensorRef
    index: int

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.base.shape[1:]

    @property
    def dtype(self) -> str:  # type: ignore[override]
        return self.base.dtype

    @property
    def sources(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.base.sources

    def rows(self, start: int, stop: int) -> NDArray[np.generic]:
        return np.asarray(self.base.rows(self.index, self.index + 1)[0])[start:stop]


@dataclass(frozen=True)
class ShapeOnlyTensor(TensorRef):
    """A tensor known by shape alone (export from a config, without a checkpoint). It cannot be read."""

    shape: tuple[int, ...]
    dtype: str
    sources: tuple[str, ...]

    def rows(self, start: int, stop: int) -> NDArray[np.generic]:
        raise InternalError(f"{self.sources}: a weight known by shape alone was read")


@dataclass(frozen=True)
class OffsetTensor(TensorRef):
    """Another reference plus a constant, in FP32 (Gemma's ``1 + weight`` norms)."""

    base: TensorRef
    offset: float

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.base.shape

    @property
    def dtype(self) -> str:  # type: ignore[override]
        return "f32"

    @property
    def sources(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.base.sources

    def rows(self, start: int, stop: int) -> NDArray[np.generic]:
        out: NDArray[np.generic] = self.base.rows(start, stop).astype(np.float32) + np.float32(self.offset)
        return out


@dataclass(frozen=True)
class ReshapeTensor(TensorRef):
    """Another reference seen with other dimensions; reading rows reads the whole base."""

    base: TensorRef
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:  # type: ignore[override]
        return self.base.dtype

    @property
    def sources(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.base.sources

    def rows(self, start: int, stop: int) -> NDArray[np.generic]:
        return self.base.read().reshape(self.shape)[start:stop]
