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

    @property
    def num_processes(self) -> int:
        self.note("num_processes")
        return super().num_processes

    @property
    def process_index(self) -> int:
        self.note("process_index")
        return super().process_index

    @property
    def is_main_process(self) -> bool:
        self.note("is_main_process")
        return super().is_main_process

    def gather(self, tensor: Any) -> Any:
        self.note("gather")
        return super().gather(tensor)

    def gather_for_metrics(self, *args: Any, **named: Any) -> Any:
        self.note("gather_for_metrics")
        return super().gather_for_metrics(*args, **named)

    def reduce(self, *args: Any, **named: Any) -> Any:
        self.note("reduce")
        return super().reduce(*args, **named)
