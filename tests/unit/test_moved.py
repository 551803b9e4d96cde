"""Promise: a name that has moved works for a release more, with a warning that names the new place."""

from importlib import import_module

import pytest

from accelerate_recipes.common import tasks


@pytest.mark.parametrize(("old", "new"), tasks.MOVED.items())
def test_module_is_found_by_its_old_name(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"tasks\.{old} is now .*tasks\.{new}; the next"):
        module = import_module(f"{tasks.__name__}.{old}")
    own = import_module(f"{tasks.__name__}.{new}")
    names = [name for name in vars(own) if not name.startswith("_")]
    assert names and all(getattr(module, name) is getattr(own, name) for name in names)


def test_what_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match="never_there"):
        import_module(f"{tasks.__name__}.never_there")
