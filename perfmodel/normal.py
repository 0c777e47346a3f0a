"""The normal distribution in NumPy.

SciPy has it too, but importing `scipy.special` takes a quarter of a second, a sixth of a whole `perfmodel predict`.
"""

from math import pi, sqrt
from typing import Any, Final

import numpy as np
from jaxtyping import Float

# Rational approximations of erf and erfc, highest power first (S. Moshier, Cephes Mathematical Library, `ndtr.c`,
# after W. J. Cody, "Rational Chebyshev approximations for the error function", Math. Comp. 23, 1969).
_ERF: Final = (
    (0.0, 9.60497373987051638749e0, 9.00260197203842689217e1, 2.23200534594684319226e3, 7.00332514112805075473e3,
     5.55923013010394962768e4),
    (1.0, 3.35617141647503099647e1, 5.21357949780152679795e2, 4.59432382970980127987e3, 2.26290000613890934246e4,
     4.92673942608635921086e4),
)  # fmt: skip
"""erf(x) / x below 1, in powers of x squared."""
_ERFC_TO_8: Final = (
    (2.46196981473530512524e-10, 5.64189564831068821977e-1, 7.46321056442269912687e0, 4.86371970985681366614e1,
     1.96520832956077098242e2, 5.26445194995477358631e2, 9.34528527171957607540e2, 1.02755188689515710272e3,
     5.57535335369399327526e2),
    (1.0, 1.32281951154744992508e1, 8.67072140885989742329e1, 3.54937778887819891062e2, 9.75708501743205489753e2,
     1.82390916687909736289e3, 2.24633760818710981792e3, 1.65666309194161350182e3, 5.57535340817727675546e2),
)  # fmt: skip
"""erfc(x) exp(x squared) between 1 and 8, in powers of x."""
_ERFC_BEYOND_8: Final = (
    (0.0, 5.64189583547755073984e-1, 1.27536670759978104416e0, 5.01905042251180477414e0, 6.16021097993053585195e0,
     7.40974269950448939160e0, 2.97886665372100240670e0),
    (1.0, 2.26052863220117276590e0, 9.39603524938001434673e0, 1.20489539808096656605e1, 1.70814450747565897222e1,
     9.60896809063285878198e0, 3.36907645100081516050e0),
)  # fmt: skip
"""The same beyond 8."""


def normal_cdf(z: Float[Any, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Probability that a standard normal variable is below `z`."""
    x = np.asarray(z, float) * sqrt(0.5)
    distance = np.abs(x)
    below = np.empty_like(x)

    # Around the mean erf, beyond it the tail: 1 - erf there would lose its digits.
    is_near = distance < 1
    near = x[is_near]
    if len(near):
        below[is_near] = 0.5 + 0.5 * near * _ratio(_ERF, near * near)
    far = x[~is_near]
    if len(far):
        tail = 0.5 * _erfc(distance[~is_near])
        below[~is_near] = np.where(far > 0, 1 - tail, tail)
    return below


def normal_quantile(probability: Float[Any, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Value that a standard normal variable is below with a probability, which is neither 0 nor 1."""
    probability = np.asarray(probability, float)
    of_lower_half = np.minimum(probability, 1 - probability)

    # Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.23: within 4.5e-4.
    t = np.sqrt(-2 * np.log(of_lower_half))
    z = _ratio(((0.0, 0.010328, 0.802853, 2.515517), (0.001308, 0.189269, 1.432788, 1.0)), t) - t

    # Each of Halley's steps triples the number of correct digits.
    for _ in range(2):
        newton = (normal_cdf(z) - of_lower_half) * sqrt(2 * pi) * np.exp(0.5 * z * z)
        z = z - newton / (1 + 0.5 * z * newton)
    return np.where(probability < 0.5, z, -z)


def _erfc(x: Float[np.ndarray, " values"]) -> Float[np.ndarray, " values"]:
    """The complementary error function from 1 on."""
    # At 30 it is 0 to any number of digits; powers of much larger numbers would overflow.
    x = np.minimum(x, 30.0)
    scaled = _ratio(_ERFC_TO_8, x)
    is_far = x >= 8
    if is_far.any():
        scaled[is_far] = _ratio(_ERFC_BEYOND_8, x[is_far])
    return scaled * np.exp(-x * x)


def _ratio(
    polynomials: tuple[tuple[float, ...], tuple[float, ...]], x: Float[np.ndarray, "*shape"]
) -> Float[np.ndarray, "*shape"]:
    """The ratio of two polynomials with these coefficients, by Horner's scheme."""
    # Both at once: of the few numbers of a prediction every call of NumPy takes longer than the arithmetic.
    columns = np.array(polynomials).reshape(2, -1, *[1] * x.ndim)
    values = columns[:, 0] * np.ones_like(x)
    for place in range(1, columns.shape[1]):
        values = values * x + columns[:, place]
    return values[0] / values[1]
