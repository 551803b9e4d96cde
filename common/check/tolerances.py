"""Tolerances: how far two results may differ and count as the same, in the parity check, `verify` and the tests.

Differences are relative. They may also be a few times the noise floor: what rounding errors change in one process. The
parity check compares single steps, in which a difference has no time to grow, and few elements of a weight jump. A
trajectory of many steps amplifies rounding, and two runs measure its noise floor: in a third one a different weight
jumped, 6 times as far (a bias before GroupNorm, under Adam).
"""

import math

TOLERANCE = 1e-5  # float32
STEP_TIMES_FLOOR = 4
METRIC_TIMES_FLOOR = 10  # of an untrained metric: a reward is the small difference of two long sums (measured: 4.1)
TRAJECTORY_TIMES_FLOOR = 10
LATER = 1e-3  # of a step after many others: real errors are larger there
# {name of a value, or "weights": tolerance}; "" is all others. A learning rate is computed, not measured.
FLOAT32 = {"": TOLERANCE, "grad_norm": 10 * TOLERANCE, "learning_rate": 0.0, "samples": 0.0, "gathered": 0.0}
# bf16 keeps 8 bits, and configs round at different points: losses differ by up to 0.7 % for our recipes. The README
# promises losses, not weights; a rounding error may flip a class, or move an R² near 0 by more than a loss.
BF16 = FLOAT32 | {"": 1e-2, "grad_norm": math.inf, "weights": math.inf}
RECORD = {"": TOLERANCE}  # one process then and now; another version may round a learning rate differently
