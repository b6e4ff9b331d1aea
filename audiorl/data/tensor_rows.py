"""Tensors of segments as JSON: {"shape", "data"} with base64 of little-endian values."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from audiorl.data.schema import FieldError
from audiorl.data.schema.rollouts import SegmentDocument, TensorDocument
from audiorl.types import Segment

_INT, _FLOAT, _BOOL = np.dtype("<i8"), np.dtype("<f4"), np.dtype("?")
_TENSORS: dict[str, np.dtype[Any]] = {
    "prompt_ids": _INT,
    "ids": _INT,
    "logprobs": _FLOAT,
    "codes": _INT,
    "prompt_codes": _INT,
    "code_mask": _BOOL,
}
"""The tensors of a segment."""


def tensor_rows(segment: Segment) -> dict[str, dict[str, Any] | None]:
    """Every tensor of a segment by name."""
    tensors = {name: getattr(segment, name) for name in _TENSORS}
    return {name: None if t is None else tensor_row(t, _TENSORS[name]) for name, t in tensors.items()}


def tensor_row(tensor: Tensor, dtype: np.dtype[Any]) -> dict[str, Any]:
    """{"shape", "data"} with the base64 of the values."""
    array = tensor.detach().cpu().numpy().astype(dtype)
    return {"shape": list(array.shape), "data": base64.b64encode(array.tobytes()).decode()}


def read_tensors(row: SegmentDocument, where: str) -> dict[str, Tensor | None]:
    """What `tensor_rows` wrote. Raises FieldError, also for tensors that do not fit each other."""
    held: dict[str, TensorDocument | None] = {name: getattr(row, name) for name in _TENSORS}
    tensors = {name: None if t is None else _tensor(t, name, f"{where}.{name}") for name, t in held.items()}
    for name, tensor in tensors.items():
        if tensor is not None:
            _check_tensor(name, tensor, tensors, f"{where}.{name}")
    return tensors


def _tensor(row: TensorDocument, name: str, where: str) -> Tensor:
    data, dtype = read_base64(row.data, f"{where}.data"), _TENSORS[name]
    if len(data) != math.prod(row.shape) * dtype.itemsize:
        raise FieldError(f"{where}.data", f"{len(data)} bytes for shape {row.shape}")
    flat = np.frombuffer(data, np.uint8 if dtype == _BOOL else dtype)  # any other byte than 0 and 1 is no bool
    return torch.from_numpy(flat.reshape(row.shape).astype(dtype))


def _check_tensor(name: str, tensor: Tensor, tensors: Mapping[str, Tensor | None], where: str) -> None:
    """Raise FieldError for a tensor of a segment that does not fit the others, and for ids that are none."""
    rows = tensors["prompt_ids" if name.startswith("prompt") else "ids"]
    assert rows is not None
    dims = {"prompt_ids": (1,), "ids": (1,), "logprobs": (1, 2)}.get(name, (2,))
    if tensor.dim() not in dims:
        raise FieldError(where, f"shape {list(tensor.shape)}, expected {dims[-1]} dimension(s)")
    if len(tensor) != len(rows):
        raise FieldError(where, f"not as long as its ids, which have {len(rows)} entries")
    widths = {t.shape[1] for t in tensors.values() if t is not None and t.dim() == 2}
    if (tensors["codes"] is None) != (tensors["code_mask"] is None):
        raise FieldError(where, "codes without code_mask, or code_mask without codes")
    if len(widths) > 1:
        raise FieldError(where, f"another number of codebooks than the others ({sorted(widths)})")
    lowest = -1 if name.endswith("codes") else 0
    if name not in ("logprobs", "code_mask") and bool((tensor < lowest).any()):
        raise FieldError(where, f"holds {int(tensor.min())}, expected {lowest} or more")


def read_base64(text: str, where: str) -> bytes:
    """Raises FieldError."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise FieldError(where, f"not base64 ({error})") from None
