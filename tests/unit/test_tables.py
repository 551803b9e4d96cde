"""Promise: a table that cannot be fitted is refused in one line that names the problem."""

import re
import runpy
from pathlib import Path

import pytest

from accelerate_recipes.common.command_line import parse
from accelerate_recipes.common.errors import UsageError
from support.recipes import LINEAR
from support.runs import ROOT

recipe = runpy.run_path(str(ROOT / LINEAR))
LinearConfig, load_table = recipe["Config"], recipe["load_table"]


@pytest.mark.parametrize(
    ("content", "arguments", "expected"),
    [
        ("a,b\n1,2\n3,4\n", "", "needs --target, the column to predict: use one of a, b"),
        ("a,b\n1,2\n3,4\n", "--target c", "--target c: no such column in"),
        ("a,b\n1,2\n3,nan\n", "--target a", "column b, row 2 below the header: expected a number, got 'nan'"),
        ("a,b\n1,2\nred,4\n", "--target b", "column a, row 2 below the header: expected a number, got 'red'"),
        ("a,b\n1,2\n3,\n", "--target a", "column b, row 2 below the header: expected a number, got ''"),
        ("a,b\n1,2\n1,3\n", "--target a", "--target a has the same value in each row"),
        ("a,b\n0,2,3\n1,5,6\n", "--target a", "row 1 has 3 values, the header has 2 names"),
        ("a,b\n1,2\n3,1_000\n", "--target a", "column b, row 2 below the header: expected a number, got '1_000'"),
        ("a,b\n", "--target a", "has no rows"),
        ("", "--target a", "has no rows"),
        (b"\x89PNG\x00\xff\xfe", "--target a", "is not text in UTF-8"),
        (None, "--target a", "no such file"),
    ],
)
def test_tables(tmp_path: Path, content: str | bytes | None, arguments: str, expected: str) -> None:
    path = tmp_path / "file.csv"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    config = parse(LinearConfig, ["--data", str(path), *arguments.split()])
    with pytest.raises(UsageError, match=re.escape(expected)):
        load_table(config)


def test_a_column_without_a_name_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file.csv").write_text(",a,b\n0,1,2\n1,3,5\n2,4,1\n")
    table = load_table(parse(LinearConfig, ["--data", str(tmp_path / "file.csv"), "--target", "b"]))
    assert table.num_features == 1
    assert "a column has no name, such as the index that pandas writes: left out" in capsys.readouterr().out
