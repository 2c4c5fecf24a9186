"""Triton's interpreter without objects that it creates again for every operation of a kernel, or never uses.

Its products are sums in fp64, rounded once. In fp32 their bits would depend on the BLAS kernel for a shape and a
processor, and a row's bits could depend on the number of rows.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

LARGEST_KEPT = 4096  # numbers of a block


def hasten(patch: pytest.MonkeyPatch) -> None:
    """Makes kernels deterministic on every processor and twice as fast."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    core, builder = interpreter.tl.core, interpreter.interpreter_builder
    prepare, languages = interpreter._patch_lang, (interpreter.tl, core)
    unwrap, equal, np_type = core._unwrap_if_constexpr, core.tuple.__eq__, interpreter._get_np_dtype
    np_types = functools.cache(np_type)
    semantic = type(interpreter.interpreter_semantic)
    check_operands, broadcast_any = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    same_dtype, cast_any, convert = core.dtype.__eq__, semantic.cast, interpreter._convert_float

    imported: dict[int, tuple[object, list[Any]]] = {}  # by the identity of a module's names, which are kept

    def prepared(function: Callable[..., None]) -> object:  # the whole language, for every device function called
        names = function.__globals__
        if id(names) not in imported:
            imported[id(names)] = names, [m for m in languages if any(m is n for n in names.values())]
        fresh = any(core.is_builtin(m.load) for m in imported[id(names)][1])
        return prepare(function) if fresh else interpreter._LangPatchScope()

    @functools.cache
    def conversions(source: Any, target: Any, rounding: Any) -> Any:  # for everything that so few bits may say
        bits = source.primitive_bitwidth
        return convert(np.arange(1 << bits, dtype=f"uint{bits}"), source, target, rounding)

    def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.primitive_bitwidth > 16:
            return convert(values, source, target, rounding)
        return conversions(source, target, rounding)[values.view(f"uint{source.primitive_bitwidth}")]

    made: dict[int, tuple[Any, int]] = {}  # by the identity of a shape that lives as long as this
    shapes: dict[int, tuple[Any, Any]] = {}

    @functools.cache
    def of_block(shape: tuple[int, ...]) -> tuple[Any, int]:
        found = core.tuple(shape), core.validate_block_shape(shape)
        made[id(found[0])] = found
        return found

    @functools.cache
    def of_tensor(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(n) for n in shape]), core.constexpr(math.prod(shape))

    def make_block_type(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        self.element_ty, self.name = element_ty, "a block"  # the name is not used
        self.shape, self.numel = made.get(id(shape)) or of_block(tuple(map(unwrap, shape)))

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        shape = type.shape if type.is_block() else ()
        found = shapes.get(id(shape))
        if found is None:
            found = of_tensor(tuple(shape))
            if id(shape) in made:
                shapes[id(shape)] = found
        self.shape, self.numel = found

    # operands of one type and shape stay as they are; a number combined with a block is the same block every time
    types = {id(each) for each in (core.float32, core.float64, core.int32, core.int64)}
    numbers: dict[Any, Any] = {}

    def prepare_operands(self: Any, lhs: Any, rhs: Any, *how: bool, **more: bool) -> tuple[Any, Any]:
        if type(lhs) is type(rhs) is core.tensor:
            if lhs.dtype is rhs.dtype and id(lhs.dtype) in types:
                return broadcast(self, lhs, rhs)
            return check_operands(self, lhs, rhs, *how, **more)
        number, block = (rhs, lhs) if type(lhs) is core.tensor else (lhs, rhs)
        if type(number) not in (int, float) or type(block) is not core.tensor or more:
            return check_operands(self, lhs, rhs, *how, **more)
        if type(number) is float and not number:  # 0.0 is -0.0
            return check_operands(self, lhs, rhs, *how, **more)
        key = type(number), number, block is lhs, id(block.dtype), id(block.shape), how
        found = numbers.get(key)
        if found is None:
            pair = check_operands(self, lhs, rhs, *how)
            same, found = pair if block is lhs else pair[::-1]
            if same is block and id(block.dtype) in types and block.numel.value <= LARGEST_KEPT:
                found.handle.data.flags.writeable = False
                numbers[key] = found
            return pair
        return (lhs, found) if block is lhs else (found, rhs)

    joined: dict[tuple[int, int], Any] = {}  # the joined shape of two, by the identities of such that live as long

    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        one, other = lhs.type, rhs.type
        if not other.is_block() and id(one.shape) in made:
            return lhs, filled(rhs, one.shape)
        if not one.is_block() and id(other.shape) in made:
            return filled(lhs, other.shape), rhs
        if not (one.is_block() and other.is_block() and id(one.shape) in made and id(other.shape) in made):
            return broadcast_any(self, lhs, rhs)
        key = id(one.shape), id(other.shape)
        if key not in joined:
            lhs, rhs = broadcast_any(self, lhs, rhs)
            joined[key] = lhs.type.shape
            return lhs, rhs
        return widened(lhs, joined[key]), widened(rhs, joined[key])

    def filled(number: Any, shape: Any) -> Any:
        data = np.full(shape.values, number.handle.data, dtype=number.handle.data.dtype)
        return of_data(data, number, shape)

    def widened(block: Any, shape: Any) -> Any:
        if block.type.shape is shape:
            return block
        return of_data(np.broadcast_to(block.handle.data, shape.values), block, shape)

    def of_data(data: Any, like: Any, shape: Any) -> Any:
        handle = interpreter.TensorHandle(data, like.handle.dtype.scalar)
        return core.tensor(handle, core.block_type(like.dtype, shape))

    def cast(self: Any, values: Any, dtype: Any, *how: Any) -> Any:
        return values if values.dtype is dtype and not how else cast_any(self, values, dtype, *how)

    def patch_attr(place: object, name: str, member: Any, _: object, scope: Any) -> None:
        inner, given = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def called(*args: Any, **more: Any) -> Any:
            more["_semantic"] = given
            return inner(*args, **more)

        scope.set_attr(place, name, called)

    def product(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        eight = [x.dtype.primitive_bitwidth == 8 and x.dtype.is_floating() for x in (a, b)]
        left, right = (
            converted(x.data, x.dtype, core.float16, None).view(np.float16) if any(eight) else x.data for x in (a, b)
        )
        total = np.matmul(left, right, dtype=np.float64) + d.data
        return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)

    for place, name, value in (
        (interpreter, "_patch_lang", prepared),
        (interpreter, "_convert_float", converted),
        (interpreter, "_get_np_dtype", lambda type: (np_type if type.scalar.is_ptr() else np_types)(type.scalar)),
        (core.block_type, "__init__", make_block_type),
        (core.tensor, "__init__", make_tensor),
        (interpreter.TensorHandle, "__post_init__", lambda handle: None),  # checks what its own code chose
        (core.dtype, "__eq__", lambda a, b: a is b or same_dtype(a, b)),
        (semantic, "binary_op_type_checking_impl", prepare_operands),
        (semantic, "broadcast_impl_value", broadcast),
        (semantic, "cast", cast),
        (interpreter, "_patch_attr", patch_attr),
        (type(builder), "create_dot", product),
        (core.tuple, "__eq__", lambda a, b: a.values == b if isinstance(b, list) else equal(a, b)),
        # without debug=True it looks for overflows and reports none
        (builder, "options", replace(builder.options, sanitize_overflow=False)),
    ):
        patch.setattr(place, name, value)
