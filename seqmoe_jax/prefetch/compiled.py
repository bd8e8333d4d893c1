"""The decorators of everything compiled with numba, and calls of C functions by address.

The compiled code is cached on disk, so only the first use on a machine waits for the compiler; importing a module
that uses it imports numba, which is why nothing does at the top of the package. `nogil` lets a worker thread
schedule while Python runs elsewhere.

A function below either also carries `typing.no_type_check`: numba compiles the plain function, so a checker of
annotations must not wrap it first.
"""

from __future__ import annotations

import ctypes
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

compiled = njit(cache=True, nogil=True)
# For the parts of a tight loop: no calls, and no checks for divisors of 0.
inlined = njit(cache=True, nogil=True, forceinline=True, error_model="numpy")


def address_of(function: Any) -> int:
    """The address of a C function that `ctypes` has loaded or made."""
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


@intrinsic
def call(typing_context: Any, address: Any, arguments: Any) -> Any:
    """`address(*arguments)` of a C function that takes words of 64 bits and returns an int.

    The address is a value, so what calls it can be cached; a `ctypes` function would be compiled into it.
    """
    signature = types.int32(types.int64, arguments)

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        word = ir.IntType(64)
        function = ir.FunctionType(ir.IntType(32), [word] * len(arguments))
        pointer = builder.inttoptr(values[0], function.as_pointer())
        return builder.call(pointer, [builder.extract_value(values[1], i) for i in range(len(arguments))])

    return signature, generate


def _pointer(element: Any) -> Any:
    pointer_type: Any = types.CPointer(element)  # type: ignore[no-untyped-call]

    @intrinsic
    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

        return pointer_type(types.int64), generate

    return pointer


# Memory at an address, to be indexed. Unlike an array it counts no references, which in a tight loop takes longer than
# all else.
int32_at, int64_at = _pointer(types.int32), _pointer(types.int64)
