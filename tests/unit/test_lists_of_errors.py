"""Promise: the benchmark of silent errors leaves out none of the lists that it is measured by."""

import runpy

from support.runs import ROOT

FAULTS = runpy.run_path(str(ROOT / "benchmarks/silent_errors/run.py"))["FAULTS"]
# The table in docs/ae-eval-s5.1-silent-issue-detection.md of TrainCheck's repository.
TRAINCHECKS = """
    baichuan2 86, DeepSpeed 1801, DeepSpeed 5794, lightning-thunder 725, mmpretrain 702, pytorch 51800, pytorch 84803,
    pytorch 96600, pytorch 104336, pytorch 115607, pytorch forum 84911, stackoverflow 60335387, stackoverflow 67180955,
    transformers 17877, transformers 23723, transformers 33844, transformers 34204, x.com/jxmnop
"""


def test_each_error_of_trainchecks_table_has_a_row() -> None:
    sources = [fault.source for fault in FAULTS.values() if fault.list == "TrainCheck"]
    for name in " ".join(TRAINCHECKS.split()).split(", "):
        assert any(source.startswith(name) for source in sources), name


def test_ttraces_kinds_have_a_row_each() -> None:
    assert len({fault.source for fault in FAULTS.values() if fault.list == "TTrace"}) >= 14


def test_an_error_is_planted_or_has_a_reason() -> None:
    for fault in FAULTS.values():
        assert fault.what.endswith(".") and (fault.why or (fault.plant is not None and fault.cause)), fault.name
