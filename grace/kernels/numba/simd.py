"""Intrinsics in LLVM's instructions, for which Numba has none: parts of arrays, patterns of numbers, and vectors of 32
lanes, of which comparisons make bits, and bits choose.

LLVM does not find such vectors in a loop over elements. Every processor can have them, with 512-bit registers or one
lane at a time. Elements are those of 1-d contiguous arrays; callers see to it that all 32 are there.
"""

from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.np.arrayobj import populate_array

intrinsic: Any = extending.intrinsic  # compiled code calls such functions without the first argument
LANES = 32
LOW31 = 0x7FFFFFFF


def _vector(element):
    return ir.VectorType(element, LANES)


def _pointer(context, builder, kind, array, start):
    """Return a pointer to 32 elements of an array, as one vector, and an element's bytes."""
    data = context.make_array(kind)(context, builder, array).data
    element = context.get_data_type(kind.dtype)
    return builder.bitcast(builder.gep(data, [start]), _vector(element).as_pointer()), kind.dtype.bitwidth // 8


def _all(builder, value):
    """Return a vector of 32 times the same number."""
    empty = ir.Constant(_vector(value.type), ir.Undefined)
    first = builder.insert_element(empty, value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, empty, ir.Constant(_vector(ir.IntType(32)), [0] * LANES))


def _loaded(context, builder, kind, array, start):
    pointer, size = _pointer(context, builder, kind, array, start)
    return builder.load(pointer, align=size)


def _bits(builder, chosen):
    return builder.bitcast(chosen, ir.IntType(LANES))


@intrinsic
def part(typing_context, array, start, stop):
    """Return ``array[start:stop]``, both within it, for as long as the array lives. References are not counted, as
    Numba does for slices, which for a bucket of 64 elements takes longer than the work on them."""

    def generate(context, builder, signature, args):
        make = context.make_array(signature.args[0])
        whole, made = make(context, builder, args[0]), make(context, builder)
        place, size = builder.gep(whole.data, [args[1]]), builder.sub(args[2], args[1])
        populate_array(made, place, [size], [whole.itemsize], whole.itemsize, None)
        return made._getvalue()

    return array(array, types.intp, types.intp), generate


@intrinsic
def pointer_of(typing_context, address):
    """Return the pointer to an address."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.uint64), generate


def _prefetching(writes):
    def typed(typing_context, address):
        def generate(context, builder, signature, args):
            pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
            function = builder.module.declare_intrinsic("llvm.prefetch", (pointer,), kind)
            builder.call(function, [builder.inttoptr(args[0], pointer), number(writes), number(3), number(1)])
            return context.get_dummy_value()

        return types.void(types.uint64), generate

    return intrinsic(typed)


prefetch, prefetch_to_write = _prefetching(0), _prefetching(1)
"""Request the memory at an address, wherever that is, before it is read or written: processors do not look beyond a few
hundred instructions."""


@intrinsic
def magnitudes_within(typing_context, bits, start, low, width):
    """Return a bit for each of 32 float32s, by bit patterns, whose magnitude's is in [low, low + width)."""

    def generate(context, builder, signature, args):
        pattern = _loaded(context, builder, signature.args[0], *args[:2])
        magnitude = builder.and_(pattern, _all(builder, ir.IntType(32)(LOW31)))
        above = builder.sub(magnitude, _all(builder, args[2]))  # wraps where it is below
        return _bits(builder, builder.icmp_unsigned("<", above, _all(builder, args[3])))

    return types.uint32(bits, types.intp, types.uint32, types.uint32), generate


@intrinsic
def not_negative(typing_context, x, start):
    """Return a bit for each of 32 float32s that is at least 0, which NaN is not."""

    def generate(context, builder, signature, args):
        values = _loaded(context, builder, signature.args[0], *args)
        return _bits(builder, builder.fcmp_ordered(">=", values, _all(builder, ir.FloatType()(0.0))))

    return types.uint32(x, types.intp), generate


@intrinsic
def add_chosen(typing_context, out, start, bits, one, other):
    """Add a number to those of 32 float32s whose bits are set, and another one to the others."""

    def generate(context, builder, signature, args):
        pointer, size = _pointer(context, builder, signature.args[0], *args[:2])
        chosen = builder.bitcast(args[2], _vector(ir.IntType(1)))
        amount = builder.select(chosen, _all(builder, args[3]), _all(builder, args[4]))
        builder.store(builder.fadd(builder.load(pointer, align=size), amount), pointer, align=size)
        return context.get_dummy_value()

    return types.void(out, types.intp, types.uint32, types.float32, types.float32), generate


@intrinsic
def lowest(typing_context, bits):
    """Return the place of the lowest bit that is set; 0 if none is."""

    def generate(context, builder, signature, args):
        place = builder.cttz(args[0], ir.IntType(1)(0))  # 32 if none is
        return builder.zext(builder.and_(place, ir.IntType(32)(LANES - 1)), ir.IntType(64))

    return types.intp(types.uint32), generate


@intrinsic
def float_of(typing_context, pattern):
    """Return the float32 of a pattern."""
    return types.float32(types.uint32), _cast_to(ir.FloatType())


@intrinsic
def pattern_of(typing_context, value):
    """Return the pattern of a float32."""
    return types.uint32(types.float32), _cast_to(ir.IntType(32))


def _cast_to(kind):
    return lambda context, builder, signature, args: builder.bitcast(args[0], kind)
