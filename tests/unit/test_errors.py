"""Promise: a refusal is one line, and arrives whole in another process."""

import pickle

import pytest

from accelerate_recipes.common.errors import Edit, UsageError

EDITS = [Edit("fsdp_version", 2, "fsdp_config")]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UsageError("--epochs 0: expected 1 or more"), "--epochs 0: expected 1 or more"),
        (UsageError("--epochs 0", "expected 1 or more"), "--epochs 0: expected 1 or more"),
        (UsageError("FSDP1", "use fsdp_version: 2", EDITS, "or see docs"), "FSDP1: use fsdp_version: 2, or see docs"),
        (UsageError("nvme", edits=EDITS, instead="use cpu", beside="no disk"), "nvme: use cpu; no disk"),
    ],
)
def test_refusal_survives_its_way_to_another_process(error: UsageError, line: str) -> None:
    received = pickle.loads(pickle.dumps(error))
    assert str(error) == str(received) == line
    assert type(received) is UsageError and vars(received) == vars(error)
