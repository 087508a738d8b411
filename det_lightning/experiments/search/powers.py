"""Powers equal to the bit to Go's in Determined's master; C's ``pow`` differs in the last bit.

Go squares repeatedly for the integral part of the exponent and uses ``exp`` and ``log`` for the rest. Go's ``log``
comes from FreeBSD. Go's ``exp`` for x86-64 is a Taylor series, with fused multiply-adds where the processor has them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

#: ln 2 in two parts, the first with zeros at the end: for ``log``, and for ``exp``.
_LOG_LN2 = (float.fromhex("0x1.62e42fee00000p-1"), float.fromhex("0x1.a39ef35793c76p-33"))
_EXP_LN2 = (float.fromhex("0x1.62e42fefa3000p-1"), float.fromhex("0x1.3de6af278ece6p-42"))
#: FreeBSD's polynomial for ``log``: every second coefficient, from the last to the first.
_LOG_ODD = (1.479819860511658591e-01, 1.818357216161805012e-01, 2.857142874366239149e-01, 6.666666666666735130e-01)
_LOG_EVEN = (1.531383769920937332e-01, 2.222219843214978396e-01, 3.999999999940941908e-01)
_EXP_TERMS = 8
#: How often ``exp`` halves the argument before the series, and squares the sum afterwards.
_EXP_HALVINGS = 4
_LARGEST_SCALE = 1 << 12


def raise_to_power(base: float, exponent: float) -> float:
    """Return ``base ** exponent`` for a positive base, with the last bit of Go's ``math.Pow``."""
    if exponent == 0 or base == 1:
        return 1.0
    if exponent == 1:
        return float(base)
    if abs(exponent) == 0.5:
        return math.sqrt(base) if exponent > 0 else 1 / math.sqrt(base)
    rest, whole = math.modf(abs(exponent))
    if rest > 0.5:
        rest -= 1
        whole += 1
    factor = _exp(rest * _log(base)) if rest else 1.0
    fraction, scale = _multiply_by_power(factor, base, int(whole))
    return math.ldexp(fraction, scale) if exponent > 0 else math.ldexp(1 / fraction, -scale)


def _multiply_by_power(factor: float, base: float, power: int) -> tuple[float, int]:
    """Return ``factor * base ** power`` as a fraction and an exponent of 2, so nothing overflows."""
    scale = 0
    square, square_scale = math.frexp(base)
    while power and abs(square_scale) <= _LARGEST_SCALE:
        if power & 1:
            factor *= square
            scale += square_scale
        power >>= 1
        square *= square
        square_scale *= 2
        if square < 0.5:
            square *= 2
            square_scale -= 1
    return factor, scale + square_scale if power else scale


def _log(x: float) -> float:
    fraction, scale = math.frexp(x)
    if fraction <= math.sqrt(0.5):
        fraction *= 2
        scale -= 1
    f = fraction - 1
    s = f / (2 + f)
    s2 = s * s
    s4 = s2 * s2
    series = s2 * _evaluate(_LOG_ODD, s4) + s4 * _evaluate(_LOG_EVEN, s4)
    half_square = 0.5 * f * f
    ln2, ln2_rest = _LOG_LN2
    return scale * ln2 - ((half_square - (s * (half_square + series) + scale * ln2_rest)) - f)


def _evaluate(coefficients: Sequence[float], x: float) -> float:
    value = 0.0
    for coefficient in coefficients:
        value = value * x + coefficient
    return value


def _exp(x: float) -> float:
    scale = round(x * (1 / math.log(2)))
    for ln2 in _EXP_LN2:
        x = _multiply_add(-scale, ln2, x)
    x /= 2**_EXP_HALVINGS
    series = 0.0
    for term in range(_EXP_TERMS, 0, -1):
        series = _multiply_add(series, x, 1 / math.factorial(term))
    above_one = x * series
    for _ in range(_EXP_HALVINGS - 1):
        above_one *= above_one + 2
    return math.ldexp(_multiply_add(above_one, above_one + 2, 1.0), scale)


def _multiply_add(a: float, b: float, c: float) -> float:
    """Return ``a * b + c``, rounded once: dividing integers rounds correctly."""
    (a, a_unit), (b, b_unit), (c, c_unit) = (value.as_integer_ratio() for value in (a, b, c))
    return (a * b * c_unit + c * a_unit * b_unit) / (a_unit * b_unit * c_unit)
