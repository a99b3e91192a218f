"""When requests arrive: a Poisson process by seed, pure."""

from __future__ import annotations

import math
import random

from kvferry.errors import ConfigurationError


def poisson(num_requests: int, rate: float, seed: int) -> tuple[float, ...]:
    """Arrival times in seconds, ascending; at an infinite `rate` (requests/s) all arrive at once, at 0.

    The same seed gives the same times, scaled by the rate. Raises ConfigurationError for a rate that is not positive.
    """
    if not rate > 0:
        raise ConfigurationError("the rate must be positive", found=str(rate), expected="requests/s, or inf")
    if math.isinf(rate):
        return (0.0,) * num_requests
    chooser, at, times = random.Random(seed), 0.0, []
    for _ in range(num_requests):
        at += chooser.expovariate(1.0)
        times.append(at / rate)
    return tuple(times)
