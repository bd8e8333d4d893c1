"""Stored bytes as floats, in Triton kernels: FP8 and FP4 by a conversion, by moving bits, or by PTX of our own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Shaped, UInt8

from pallas_kernels.fused_moe.config import Fp8Mode
from pallas_kernels.fused_moe.swiglu import fp4_halves
from pallas_kernels.layout import FP8, ExpertLayout


def _bytes_to_floats(sign: int, rest: int, mask: int) -> str:
    """PTX that makes four float32s of four bytes in one register, of each byte its sign bit and the bits below it.

    They are moved to where a float16 has them: the sign `sign` bits up, the rest `rest` bits up, of which those in
    `mask` count. Bytes 0 and 2, and 1 and 3, share a register, so one instruction moves two. Triton by itself would
    widen every byte to a register of its own.
    """

    def moved(register: str, by: int) -> str:
        return f"{'shl' if by > 0 else 'shr'}.b32 {register}, $4, {abs(by)};"

    lines = [".reg .b32 s, m, h;", ".reg .f16 a, b;"]
    for first, up in ((0, 0), (1, 8)):
        lines += [moved("s", sign - up), "and.b32 s, s, 0x80008000;", moved("m", rest - up)]
        lines += [f"and.b32 m, m, {mask << 16 | mask:#x};", "or.b32 h, s, m;", "mov.b32 {a, b}, h;"]
        lines += [f"cvt.f32.f16 ${first}, a;", f"cvt.f32.f16 ${first + 2}, b;"]
    return "{\n" + "\n".join(lines) + "\n}"


# e2m1 in the low and in the high half of a byte, and e4m3.
_FP4_LOW, _FP4_HIGH = _bytes_to_floats(12, 9, 0x0E00), _bytes_to_floats(8, 5, 0x0E00)
_FP8_BITS = _bytes_to_floats(8, 7, 0x3F80)


def _inline(asm: str, tile: UInt8[Array, "..."]) -> Float32[Array, "..."]:
    (values,) = plgpu.elementwise_inline_asm(
        asm, args=[tile], constraints="=f,=f,=f,=f,r", pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(tile.shape, jnp.float32)],
    )  # fmt: skip
    return values


def fp8_units(tile: UInt8[Array, "..."], mode: Fp8Mode, *, inline: bool) -> Float[Array, "..."]:
    """e4m3 bytes as floats of 1 / `fp8_unit` of their values. `bits` takes the two NaN codes, which weights never hold,
    for 480. `inline` is by PTX of our own, which only a GPU can run."""
    if mode == "convert":
        return jax.lax.bitcast_convert_type(tile, jnp.dtype(FP8))
    # e4m3 is a float16 of a smaller bias: exponent and mantissa in place, the value is 2**8 too small.
    if inline:
        return _inline(_FP8_BITS, tile)
    wide = tile.astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(((wide & 0x80) << 8) | ((wide & 0x7F) << 7), jnp.float16)


def fp8_unit(mode: Fp8Mode) -> float:
    return 1.0 if mode == "convert" else 2.0**8


def fp4_units(tile: UInt8[Array, "..."], *, inline: bool) -> Float32[Array, "... 2"]:
    """The two e2m1 codes of each byte as floats of 1 / `FP4_UNIT` of their values."""
    if inline:
        halves = [_inline(_FP4_LOW, tile), _inline(_FP4_HIGH, tile)]
    else:
        halves = [fp4_halves(tile).astype(jnp.float32), fp4_halves(tile >> 4).astype(jnp.float32)]
    return jnp.stack(halves, axis=-1)


def weight_values(tile: Shaped[Array, "..."], layout: ExpertLayout, name: str) -> Float[Array, "..."]:
    """Stored integers as the floats they are (not for FP8)."""
    return jax.lax.bitcast_convert_type(tile, jnp.dtype(layout.field(name).dtype))
