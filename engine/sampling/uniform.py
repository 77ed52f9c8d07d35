"""The one source of randomness: a number from (seed, position), without any state to hand over or to lose.

It is SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014) used as a counter:
its n-th output is a mixing function of n times a constant, so any position is reached directly. Seed 0 gives the
published sequence; other seeds start at a mixed, hence unrelated, place in the same period, so that neighbouring seeds
share nothing.
"""

_MASK = 2**64 - 1
_INCREMENT = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) of that position, a multiple of 2^-53; any integers are valid, seeds modulo 2^64."""
    return (_mix(_mix(seed & _MASK) + (position + 1) * _INCREMENT) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x &= _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)
