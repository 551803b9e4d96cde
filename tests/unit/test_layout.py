"""Promise: configs and code have the structure that the documentation describes."""

import ast
import re
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import nbformat
import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from support.launching import CONFIGS
from support.runs import ROOT

sys.path.insert(0, str(ROOT / "docs" / "tools"))
import gallery
import modules
import walk

from accelerate_recipes.catalog import read_recipe


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_config_has_a_header_and_no_unknown_key(path: Path) -> None:
    text = path.read_text()
    header = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    command = f"accelerate launch --config_file accelerate_configs/{path.name} "
    assert header[-1].startswith(command) and "recipes/" in header[-1]
    assert any(line.startswith("Needs: ") for line in header) and any(line.startswith("Pick it ") for line in header)
    config = load_config_from_file(str(path))  # raises on unknown keys
    known = set(yaml.safe_load(text))
    assert {"compute_environment", "distributed_type", "mixed_precision", "num_machines", "num_processes"} <= known
    assert "accumulation" not in text and "clipping:" not in text  # the command line decides these
    others = {"single": 1, "hsdp_tensor_parallel": 8, "fsdp2_tensor_pipeline": 8}
    four = ["hsdp", "multi_node_hsdp", "fsdp2_tensor_parallel", "fsdp2_sequence_parallel", "fsdp2_pipeline"]
    others |= dict.fromkeys(four, 4)
    assert config.num_processes == others.get(path.stem, 2)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_config_sections_hold_only_what_the_launcher_takes(path: Path) -> None:
    """Accelerate silently ignores a misspelt key inside fsdp_config or deepspeed_config."""
    from accelerate.commands.launch import launch_command_parser

    options = {option for action in launch_command_parser()._actions for option in action.option_strings}
    content = yaml.safe_load(path.read_text())
    for section in ("fsdp_config", "deepspeed_config", "parallelism_config"):
        for key in content.get(section, {}):
            assert f"--{key}" in options, f"{section}: {key}"


def test_loop_names_no_parallelism() -> None:
    text = (ROOT / "common" / "loop.py").read_text().lower()
    assert not re.search(r"\b(ddp|fsdp|deepspeed|zero_?[123]|tensor.parallel|pipeline)", text)


def test_the_launcher_s_variables_are_read_in_one_module() -> None:
    names = "RANK|WORLD_SIZE|LOCAL_|GROUP_|MASTER_|TORCHELASTIC_|ACCELERATE_|FSDP_|PARALLELISM_CONFIG_"
    reads = re.compile(rf"(environ|settings)(\.get)?[\[(]f?\W({names})|(environ\.(items|copy))|dict\(os\.environ\)")
    found = {
        path.relative_to(ROOT / "common").as_posix()
        for path in (ROOT / "common").rglob("*.py")
        if reads.search(path.read_text())
    }
    # A strategy reads its own settings.
    assert found == {
        "environment.py",
        "parallel/deepspeed.py",
        "parallel/fsdp2.py",
        "parallel/sharding.py",
        "parallel/strategy.py",
    }


def test_recipes_stay_short_and_never_ask_where_they_run() -> None:
    for path in (ROOT / "recipes").glob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 180, path
        asks = "num_processes|process_index|is_main_process|distributed_type|pipeline_stages|expert_parallel"
        assert not re.search(asks, text), path


def test_notebook_is_committed_without_output() -> None:
    notebook = nbformat.read(ROOT / "recipes" / "notebook.ipynb", as_version=4)
    assert not any(cell.outputs or cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


def python_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def test_a_page_shows_lines_that_run() -> None:
    lines = (ROOT / "recipes" / "mnist.py").read_text().splitlines()
    shown = python_of((ROOT / "docs" / "recipe.md").read_text())
    assert shown
    for line in "\n".join(shown).splitlines():
        assert line in lines, line


def test_the_readme_shows_the_whole_script_of_your_model() -> None:
    parts = python_of((ROOT / "docs" / "your-model.md").read_text().partition("## A loss that compares samples")[0])
    assert python_of((ROOT / "README.md").read_text()) == ["\n\n".join(parts)]


def test_first_screen_of_the_readme() -> None:
    screen = (ROOT / "README.md").read_text().partition("\n## ")[0]
    assert screen.count("\n") <= 30 and len(re.findall(r"^accelerate launch", screen, re.MULTILINE)) == 2
    evaluations = re.findall(r"eval/loss \S+  eval/accuracy \S+", screen)
    assert len(evaluations) == 2 and len({*evaluations}) == 1


@pytest.mark.parametrize("path", [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", text) + re.findall(r' src="((?!\.\.)[^"]+)"', text):
        name, _, heading = target.partition("#")
        if not name.startswith("http"):
            page = path.parent / name if name else path
            assert page.exists(), target
            if heading:
                headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
                assert heading in [re.sub(r"[^\w\- ]", "", one).lower().replace(" ", "-") for one in headings], target


def test_the_walk_through_a_step_is_what_a_step_does() -> None:
    page = walk.PAGE.read_text()
    stops = walk.walked()
    assert page == walk.written(page, walk.table(stops)), "type: python docs/tools/walk.py"
    core = [stop for stop in stops if not stop.is_plug]
    step = [stop for stop in core if stop.file.startswith("parallel/")] + [
        stop for stop in core if "seeds" in stop.file
    ]
    assert sum(stop.lines for stop in core) < 350 and len({stop.file for stop in step}) <= 6


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/*.py")), ids=lambda path: path.stem)
def test_a_recipe_s_page_begins_with_its_docstring(path: Path) -> None:
    page = (gallery.PAGES / f"{path.stem}.md").read_text()
    assert page.startswith(gallery.head(read_recipe(path)) + gallery.CURVES), (
        "type: python docs/tools/gallery.py --data"
    )


def test_what_machines_of_others_run_is_in_the_makefile() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    texts = {path: path.read_text() for path in (*ROOT.glob(".github/workflows/*.yml"), ROOT / "Dockerfile")}
    for path, text in texts.items():
        named = re.findall(r"\bmake\W+(\w[\w-]*)", re.sub(r"^ *#.*|RUN apt.*", "", text, flags=re.MULTILINE))
        assert named and {*named} - {"venv"} <= {*targets}, path
        assert path.suffix != ".yml" or yaml.safe_load(text)["jobs"]


def test_site_shows_each_page() -> None:
    shown = (ROOT / "mkdocs.yml").read_text()
    for path in ROOT.glob("docs/**/*.md"):
        assert f": {path.relative_to(ROOT / 'docs')}\n" in shown


def test_the_table_of_modules_is_that_of_the_code() -> None:
    page = modules.PAGE.read_text()
    assert page == modules.written(page), "type: python docs/tools/modules.py"
    named = [path for layer in modules.layers() for path in modules.modules_of(layer)]
    assert sorted(named) == sorted(path for path in modules.COMMON.rglob("*.py") if path.name != "__init__.py")


def test_recipes_import_what_is_public() -> None:
    """The page says what a recipe may import. Each name is there, and a recipe imports nothing else of ours."""
    section = modules.PAGE.read_text().partition("## What a recipe may import\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", section, re.MULTILINE))
    public = {place: re.findall(r"`(\w+)`", names) for place, names in rows.items()}
    for place, names in public.items():
        assert all(hasattr(import_module(place), name) for name in names), place
    for place in ("accelerate_recipes", "accelerate_recipes.common.data"):
        assert public[place] == sorted(import_module(place).__all__), place
    tasks = "accelerate_recipes.common.tasks"
    for path in (ROOT / "recipes").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            place = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if place.startswith(f"{tasks}."):
                assert not [name.name for name in node.names if name.name.startswith("_")], path
            elif place.partition(".")[0] == "accelerate_recipes":
                assert {name.name for name in node.names} <= {*public.get(place, ())}, f"{path}: {place}"


def test_each_module_and_each_class_has_a_name_of_its_own() -> None:
    paths = [path for room in ("common", "accelerate_recipes") for path in (ROOT / room).rglob("*.py")]
    paths = [path for path in paths if not path.is_relative_to(ROOT / "accelerate_recipes" / "common")]
    classes = [
        node.name for path in paths for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)
    ]
    names = Counter([path.name for path in paths if not path.name.startswith("__")] + classes)
    assert len(names) > 300 and not [name for name, times in names.items() if times > 1]
