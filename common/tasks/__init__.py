"""Helpers for the tasks of recipes: images, tables, texts, chats, pretrained models. The loop imports none of them."""

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

MOVED = {  # {old name: new one}; a name stays for one release
    "cache": "streams",
    "embedded": "reading.sources",
    "image_folders": "reading.labelled_images",
    "image_format": "vision.images",
    "known_classes": "reading.labelled",
    **{file.stem: f"{file.parent.name}.{file.stem}" for file in sorted(Path(__file__).parent.glob("*/[!_]*.py"))},
}


class _Moved(MetaPathFinder, Loader):
    """Finds a module by its old name, with a DeprecationWarning."""

    def find_spec(self, name: str, *others: Any) -> ModuleSpec | None:
        package, _, old = name.rpartition(".")
        return ModuleSpec(name, self) if package == __name__ and old in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        new = f"{__name__}.{MOVED[module.__name__.rpartition('.')[2]]}"
        line = f"{module.__name__} is now {new}; the next release removes the old name"
        warnings.warn(line, DeprecationWarning, stacklevel=2)
        found = vars(import_module(new))
        vars(module).update({name: found[name] for name in found if not name.startswith("__")})


sys.meta_path.append(_Moved())
