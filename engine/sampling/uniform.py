"""The one source of randomness: a number from (seed, position, token id), without any state to hand over or to lose.

It is SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014) used as a counter:
its n-th output is a mixing function of n times a constant, so any place is reached directly. It is used twice:
positions count from a place mixed from the seed, and give a key each; tokens count from that key. So neighbouring seeds
and positions share nothing.
"""

_MASK = 2**64 - 1
INCREMENT = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB


def position_key(seed: int, position: int) -> int:
    """64 bits for a position; any integers are valid, seeds modulo 2^64."""
    return _mix(_mix(seed) + (position + 1) * INCREMENT)


def uniform(key: int, token_id: int) -> float:
    """A token's number in (0, 1) under a position's key: an odd multiple of 2^-54."""
    return ((_mix(key + (token_id + 1) * INCREMENT) >> 11) + 0.5) * 2.0**-53


def _mix(x: int) -> int:
    x &= _MASK
    x = (x ^ (x >> 30)) * FIRST_FACTOR & _MASK
    x = (x ^ (x >> 27)) * SECOND_FACTOR & _MASK
    return x ^ (x >> 31)
