"""Powers have the last bit of Go's ``math.Pow``, which draws hyperparameters of the type ``log`` in Determined."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_lightning.experiments.search.generator import Generator
from det_lightning.experiments.search.powers import raise_to_power
from det_lightning.experiments.search.space import draw, list_values
from tests.experiments.search.spaces import power

#: Base, exponent and the power, by Go 1.19 to 1.27 on x86-64, in two columns.
OF_GO = """
10 -1.1769310230148289 0x1.108a06e142312p-04              | 0.7071067811865476 0.34892565722342006 0x1.c5ae8e7d352f9p-01
10 -0.12368659871912513 0x1.811bd5a4e438dp-01             | 0.7071067811865476 -8.796907033581915 0x1.516e9faee7794p+04
10 -3.123765608332537 0x1.8a4793fbfe6ecp-11               | 10 0 0x1p+00
10 -3.1863485318867006 0x1.555debff45265p-11              | 10 1 0x1.4p+03
10 -4.205824411258034 0x1.051e015772504p-14               | 10 -1 0x1.999999999999ap-04
10 -5.990243774904968 0x1.1288b2cf06426p-20               | 10 0.5 0x1.94c583ada5b53p+01
10 -2.7338147392012155 0x1.e3ddb7bf6ec92p-10              | 10 -0.5 0x1.43d136248490fp-02
10 -3.020515853051138 0x1.f418c70d1eea6p-11               | 10 1.5 0x1.f9f6e4990f228p+04
2 2.5553891897827463 0x1.783569bc7d337p+02                | 10 -2.5 0x1.9e7c6e43390b6p-09
2 -1.7586309155368496 0x1.2e9f04b625313p-02               | 10 3 0x1.f4p+09
2.718281828459045 4.807338367007015 0x1.e99f1d55d2282p+06 | 10 -3 0x1.0624dd2f1a9fcp-10
2.718281828459045 -6.25792832026951 0x1.f60f86c7e61ebp-10 | 10 22 0x1.0f0cf064dd592p+73
0.5 3.530597483886697 0x1.6270f2b8cd7fap-04               | 10 300 0x1.7e43c880075ap+996
0.5 9.444223054453309 0x1.784f4d4099eaap-10               | 10 -300 0x1.56e1fc2f8f355p-997
3 5.8740737889956645 0x1.3d67ff5d3b237p+09                | 10 -307.9 0x1.21af47408ac94p-1023
3 -1.540227086108139 0x1.79193b23820edp-03                | 10 -320 0x1.fap-1064
1.5 4.460718403091244 0x1.868c134215352p+02               | 10 -323.4 0x1p-1074
1.5 2.8419608606832747 0x1.952f9dfa36eep+01               | 10 -400 0x0p+00
0.1 5.6347991398470825 0x1.372de8a68313bp-19              | 10 308 0x1.1ccf385ebc8a3p+1023
0.1 -6.056782698697768 0x1.163df66a073fdp+20              | 10 0.25 0x1.c73d51c54470fp+00
7.25 5.08182019756765 0x1.700bfd386f97p+14                | 10 -1e-09 0x1.ffffffec388fep-01
7.25 -7.091324229319834 0x1.a988ab0c0a8c1p-21             | 10 -1e+300 0x0p+00
1e-300 0.40273658605459933 0x1.8f523c78c6701p-402         | 1 123.4 0x1p+00
1e-300 0.3969566596624099 0x1.5228958e27438p-396          | 2 -1074 0x1p-1074
1e+300 -0.20647096067265652 0x1.2d6433727599bp-206        | 2 -1075.5 0x0p+00
1e+300 0.32095736400865893 0x1.d063354ad1d73p+319         | 2 1023.999 0x1.ffa52de61c1b3p+1023
0.9999 -6.186622305712315 0x1.00288f2919603p+00           | 0.5 1e+19 0x0p+00
0.9999 9.248643315481694 0x1.ff86d37fabd6ep-01
"""


@pytest.mark.parametrize("row", re.split(r" *[|\n] *", OF_GO.strip()))
def test_power_is_the_one_of_go(row: str) -> None:
    base, exponent, power = row.split()
    assert raise_to_power(float(base), float(exponent)).hex() == float.fromhex(power).hex()


@given(base=st.floats(1e-10, 1e10), exponent=st.floats(-25, 25))
def test_power_is_as_good_as_exact(base: float, exponent: float) -> None:
    assert raise_to_power(base, exponent) == pytest.approx(math.pow(base, exponent), rel=1e-13)


def test_draw_and_a_grid_have_these_powers() -> None:
    exponent = Generator(3).uniform(-5, -1)
    assert draw({"lr": power(-5, -1, 10)}, Generator(3)) == {"lr": raise_to_power(10, exponent)}
    assert list_values(power(-2.75, -2.25, 10, count=2)) == [raise_to_power(10, -2.75), raise_to_power(10, -2.25)]


def test_power_that_is_too_large_is_an_error() -> None:
    with pytest.raises(OverflowError):
        raise_to_power(10, 309)
