"""Make bfloat16 right under Triton's interpreter (TRITON_INTERPRET=1): casts, arithmetic and ``tl.dot``. For the tests
only.

The interpreter holds a bf16 tensor as its bits in uint16 and, left alone, truncates where a GPU rounds, and adds and
multiplies the bits as integers. Here every bf16 value is widened to fp32, exactly; the operation is done there; the
result is rounded to nearest even, as a GPU does. Dots accumulate in fp32. What stays wrong is none of a kernel's
business: bf16 atomics and scans.
"""

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder as Builder
from triton.runtime.interpreter import TensorHandle

_cast, _dot, _binary, _unary = Builder.cast_impl, Builder.create_dot, Builder.binary_op, Builder.unary_op


def to_fp32(bits: np.ndarray) -> np.ndarray:
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Bits of the nearest bf16, ties to even; a NaN stays one (rounding its bits could carry it to -0)."""
    values = np.asarray(values, dtype=np.float32, order="C")
    bits = values.view(np.uint32)
    with np.errstate(over="ignore"):  # only a NaN's bits wrap round
        rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _is_bf16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _widen(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(to_fp32(np.ascontiguousarray(handle.data)), tl.float32) if _is_bf16(handle) else handle


def _narrow(handle: TensorHandle) -> TensorHandle:
    is_comparison = handle.data.dtype == bool
    return handle if is_comparison else TensorHandle(to_bf16(handle.data), tl.bfloat16)


def _cast_impl(self, src, dst_type):
    source, target = src.dtype.scalar, dst_type.scalar
    if source == target or tl.bfloat16 not in (source, target):
        return _cast(self, src, dst_type)
    wide = _widen(src) if source == tl.bfloat16 else _cast(self, src, tl.float32)
    if target == tl.bfloat16:
        return _narrow(wide)
    return wide if target == tl.float32 else _cast(self, wide, dst_type)


def _binary_op(self, lhs, rhs, op):
    return _narrow(_binary(self, _widen(lhs), _widen(rhs), op)) if _is_bf16(lhs) else _binary(self, lhs, rhs, op)


def _unary_op(self, arg, op):
    return _narrow(_unary(self, _widen(arg), op)) if _is_bf16(arg) else _unary(self, arg, op)


def _create_dot(self, a, b, acc, *precision):
    return _dot(self, _widen(a), _widen(b), acc, *precision)


def install() -> None:
    Builder.cast_impl, Builder.create_dot = _cast_impl, _create_dot
    Builder.binary_op, Builder.unary_op = _binary_op, _unary_op
