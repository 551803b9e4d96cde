"""Promise: the best evaluation is the best value of one metric, and always finite."""

import math

from accelerate_recipes.common.state import TrainState


def test_number_that_is_none_is_never_the_best() -> None:
    state = TrainState()
    values = [math.nan, 0.5, math.inf, 0.1, math.nan]
    assert [state.records_best("loss", value) for value in values] == [False, True, False, True, False]
    assert state.records_best("accuracy", 0.05) and state.num_not_better == 0  # another metric
