"""Promise: at 10 million weights, too, what does not give the result of one process is refused, with the true cause."""

from pathlib import Path

import pytest

from process.test_equal_or_refused import DRAWN
from support.launching import fork
from support.recipes import FLAGS, USERS

TEN_MILLION = {"USERS_WIDTH": "1120"}


@pytest.mark.large
@pytest.mark.parametrize(("habit", "config"), [cell for cell, expected in DRAWN.items() if expected is not None])
def test_habit_is_refused_with_its_cause(tmp_path: Path, habit: str, config: str) -> None:
    arguments = f"--{habit} --hang_timeout 120{FLAGS.get(config, '')}"
    run = fork(tmp_path / "run", config, USERS, arguments, env=TEN_MILLION, succeeds=False)
    assert run.exit_code == 2 and DRAWN[habit, config] in run.stderr, (run.exit_code, run.stdout, run.stderr)
