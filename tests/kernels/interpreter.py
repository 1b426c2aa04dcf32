"""Completes Triton's interpreter (3.6.0) as far as flash-linear-attention's unmodified kernels need it.

The interpreter runs a kernel program by program in NumPy. `complete` closes these gaps:

1. Autotuning measures on a device. With one configuration left there is nothing to measure.
2. A tensor of one element as an index: `int(array)` is an error since NumPy 2.4.
3. A loop counts in Python integers, compiled Triton in tensors, which have `.to`.
4. bfloat16 is kept as its bits and calculated with as if they were integers; here every operation is made
   in float32 and rounded to nearest even, as hardware does.
5. Block shapes must be powers of two; Ascend's Triton takes any.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import autotuner, interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle

VERSION = "3.6.0"
BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift)


class Counter(int):
    """The variable of a loop: an integer with the methods of a scalar tensor that kernels call on it."""

    def to(self, dtype: Any) -> Any:
        data = np.array([int(self)], dtype=interpreter._get_np_dtype(dtype))
        return tl.tensor(TensorHandle(data, dtype), dtype)


def _keep_counting(name: str) -> None:
    plain = getattr(int, name)

    def calculate(self: Counter, other: Any) -> Any:
        result = plain(self, other) if isinstance(other, int) else NotImplemented
        return result if result is NotImplemented else Counter(result)

    setattr(Counter, name, calculate)


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    _keep_counting(f"__{_name}__")
    _keep_counting(f"__r{_name}__")


def integer(value: Any) -> int:
    """Return the number in a constexpr, a tensor of one element or an integer."""
    return (
        int(value.handle.data.item()) if isinstance(value, tl.tensor) else int(getattr(value, "value", value))
    )


def count(start: Any, stop: Any = None, step: Any = 1, **hints: Any) -> Iterator[Counter]:
    """`range`, `tl.range` and `tl.static_range` of a kernel; hints are for compilers."""
    first, last = (0, start) if stop is None else (start, stop)
    step = 1 if step is None else integer(step)
    return (Counter(value) for value in range(integer(first), integer(last), step))


def widen(bits: np.ndarray) -> np.ndarray:
    """Return float32 of bfloat16's bits."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """Return bfloat16's bits, rounded to nearest even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF).astype(np.uint32)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def is_bfloat16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def value_of(handle: TensorHandle) -> np.ndarray:
    return widen(handle.data) if is_bfloat16(handle) else handle.data


def complete() -> None:
    """Change the interpreter of this process.

    Raises:
        SystemExit: another version of Triton, whose interpreter has not been looked at.
    """
    if triton.__version__ != VERSION:
        raise SystemExit(
            f"this is Triton {triton.__version__}; its interpreter is completed for {VERSION} only"
        )
    np.seterr(over="ignore", invalid="ignore")  # kernels also calculate what they mask out afterwards
    _autotuning()
    _loops()
    _bfloat16()
    tl.core.validate_block_shape = lambda shape: math.prod(map(integer, shape))


def _autotuning() -> None:
    plain = autotuner.Autotuner.__init__

    def initialize(self: Any, fn: Any, arg_names: Any, configs: list[Any], *args: Any, **kwargs: Any) -> None:
        plain(self, fn, arg_names, configs[:1], *args, **kwargs)

    autotuner.Autotuner.__init__ = initialize


def _loops() -> None:
    tensor, core = interpreter._patch_lang_tensor, interpreter._patch_lang_core
    rewrite = interpreter.FunctionRewriter._compile_and_exec

    def patch_tensor(target: Any, scope: Any) -> None:
        tensor(target, scope)
        scope.set_attr(target, "__index__", integer)

    def patch_core(language: Any, scope: Any) -> None:
        core(language, scope)
        scope.set_attr(language, "range", count)
        scope.set_attr(language, "static_range", count)

    def compile_function(self: Any, tree: Any) -> Any:
        self.fn.__globals__["range"] = count
        return rewrite(self, tree)

    interpreter._patch_lang_tensor, interpreter._patch_lang_core = patch_tensor, patch_core
    interpreter.FunctionRewriter._compile_and_exec = compile_function


def _bfloat16() -> None:
    plain = {
        name: getattr(InterpreterBuilder, name)
        for name in ("binary_op", "unary_op", "create_dot", "cast_impl")
    }
    plain_fp_to_fp, plain_sum = InterpreterBuilder.create_fp_to_fp, ReduceOps.sum

    def binary_op(self: Any, lhs: TensorHandle, rhs: TensorHandle, op: Callable[..., Any]) -> TensorHandle:
        if op in BITWISE or not (is_bfloat16(lhs) or is_bfloat16(rhs)):
            return plain["binary_op"](self, lhs, rhs, op)
        result = op(value_of(lhs), value_of(rhs))
        if result.dtype == np.bool_:  # a comparison: the caller gives it its type
            return TensorHandle(result, lhs.dtype.scalar)
        return TensorHandle(narrow(result), tl.bfloat16)

    def unary_op(self: Any, arg: TensorHandle, op: Callable[..., Any]) -> TensorHandle:
        if is_bfloat16(arg):
            return TensorHandle(narrow(op(widen(arg.data))), tl.bfloat16)
        return plain["unary_op"](self, arg, op)

    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *how: Any) -> TensorHandle:
        if is_bfloat16(a) or is_bfloat16(b):  # multiplied exactly, added in d's float32
            product = np.matmul(value_of(a), value_of(b), dtype=d.data.dtype)
            return TensorHandle(product + d.data, d.dtype.scalar)
        return plain["create_dot"](self, a, b, d, *how)

    def convert(src: TensorHandle, to: Any) -> TensorHandle:
        values = value_of(src)
        if to == tl.bfloat16:
            data = src.data if is_bfloat16(src) else narrow(values.astype(np.float32))
        else:
            data = values.astype(interpreter._get_np_dtype(to))
        return TensorHandle(data, to)

    def cast_impl(self: Any, src: TensorHandle, dst_type: Any) -> TensorHandle:
        if tl.bfloat16 in (src.dtype.scalar, dst_type.scalar):
            return convert(src, dst_type.scalar)
        return plain["cast_impl"](self, src, dst_type)

    def create_fp_to_fp(self: Any, src: TensorHandle, dst_type: Any, rounding: Any) -> TensorHandle:
        if tl.bfloat16 in (src.dtype.scalar, dst_type.scalar):
            return convert(src, dst_type.scalar)
        return plain_fp_to_fp(self, src, dst_type, rounding)

    def add_up(self: Any, values: Any) -> Any:
        if values.dtype.scalar != tl.bfloat16:
            return plain_sum(self, values)
        total = np.sum(widen(values.handle.data), axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(narrow(total), values.dtype)

    for function in (binary_op, unary_op, create_dot, cast_impl, create_fp_to_fp):
        setattr(InterpreterBuilder, function.__name__, function)
    ReduceOps.sum = add_up
