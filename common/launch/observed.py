"""An Accelerator with the layout of the run. It records where a recipe asks for the number of processes."""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from ..layout import Layout
from ..package import is_own


class ObservedAccelerator(Accelerator):
    """Accelerate's own, which notes where the recipe's code asks how many processes there are, or gathers by hand.

    Attributes:
        layout: of the run.
        asked: {what the recipe asks for: the file and line of the first time}.
    """

    def __init__(self, layout: Layout, **named: Any):
        self.layout, self.asked = layout, dict[str, str]()
        super().__init__(**named)

    def note(self, what: str) -> None:
        """Notes the caller of the caller, if that is code of the recipe."""
        frame = sys._getframe(2)
        if what not in self.asked and is_own(frame.f_code.co_filename):
            self.asked[what] = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"

    @property
    def device(self) -> torch.device:
        """Accelerate names cpu:0, to which torch copies what is on the CPU already."""
        device = super().device
        return torch.device("cpu") if device.type == "cpu" else device


def _observed(name: str) -> Any:
    """A property or method of Accelerate's own that notes who asks for it."""
    own: Any = getattr(Accelerator, name)

    def asked(self: ObservedAccelerator, *args: Any, **named: Any) -> Any:
        self.note(name)
        found = own.__get__(self)
        return found if isinstance(own, property) else found(*args, **named)

    return property(asked) if isinstance(own, property) else asked


for _name in ("num_processes", "process_index", "is_main_process", "gather", "gather_for_metrics", "reduce"):
    setattr(ObservedAccelerator, _name, _observed(_name))
