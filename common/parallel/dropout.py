"""Dropout during a step: what each call of it must know, and what is refused without `--exact_dropout`."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from common.errors import UsageError
from common.parallel.tensor_parallel import check_plan, tensor_parallel_size
from common.plan import Plan


class Dropout(ABC):
    """While its context is open, its methods replace the dropout of `torch.nn.functional`, alone and in attention.

    Args:
        accelerator: from `start(config)`.
        model: the recipe's module, before anything wraps or divides it.
        plan: of the run.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, plan: Plan):
        self._plan, self._device = plan, accelerator.device
        # Weak: a pipeline drops the layers of other stages.
        self._names = WeakKeyDictionary({module: name for name, module in model.named_modules()})
        size = tensor_parallel_size(accelerator)
        self._styles = check_plan(model, size) if size > 1 else {}
        self._tensor_rank = accelerator.torch_device_mesh["tp"].get_local_rank() if size > 1 else 0
        self._tensor_size = size
        self._width: int | None = None  # of this process's part of a divided layer's output; None where all is whole
        self._running: list[str] = []  # names of the modules whose forward pass runs, the innermost last

    def at(self, step: int, row: int) -> None:  # noqa: B027  # not abstract: not all need it
        """Says which forward pass comes next. Call it after the generators were seeded.

        Args:
            step: optimizer steps taken.
            row: the number of the micro-batch among those of all processes in this step.
        """

    @abstractmethod
    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Takes the place of `torch.nn.functional.dropout`."""

    @abstractmethod
    def attention(self, *args: Any, **named: Any) -> Tensor:
        """Takes the place of `torch.nn.functional.scaled_dot_product_attention`."""

    def __enter__(self) -> Self:
        self._width = None
        self._running.clear()
        replaced = {"dropout": self.dropout, "scaled_dot_product_attention": self.attention}
        self._originals = {name: getattr(functional, name) for name in replaced}
        for name, function in replaced.items():
            setattr(functional, name, function)
        # Hooks of all modules: nothing stays on the model after the step. An exception ends a recomputation early.
        enter, leave = register_module_forward_pre_hook(self._enter), self._leave
        self._hooks = [enter, register_module_forward_hook(leave, always_call=True)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()
        for name, function in self._originals.items():
            setattr(functional, name, function)

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(module)  # None for what parallelism wraps around modules
        if name is not None:
            self._running.append(name)
            if name in self._styles:
                self._width = None

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._names.get(module)
        if name is not None:
            self._running.pop()
            if self._styles.get(name) == "colwise":
                width = module.out_features if isinstance(module, nn.Linear) else module.embedding_dim
                self._width = int(width) // self._tensor_size  # type: ignore[arg-type]  # a Linear or an Embedding


class UndividedDropout(Dropout):
    """Refuses dropout whose masks would differ from those of one process, in the first step: between layers that
    tensor parallelism divides, and in a pipeline, where each stage draws its own random numbers."""

    _has_seen_a_step = False

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        self._check(p if training else 0)
        return self._originals["dropout"](input, p, training, inplace)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **named: Any,
    ) -> Tensor:
        self._check(dropout_p)
        return self._originals["scaled_dot_product_attention"](query, key, value, attn_mask, dropout_p, *args, **named)

    def __enter__(self) -> Self:
        return self if self._has_seen_a_step else super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not self._has_seen_a_step:
            super().__exit__(kind, error, _)
            self._has_seen_a_step = True

    def _check(self, probability: float) -> None:
        is_pipeline = self._plan.config.pipeline_stages > 1
        if probability > 0 and (is_pipeline or self._width is not None):
            where = "in a pipeline" if is_pipeline else "between layers that tensor parallelism divides"
            raise UsageError(
                f"{self._running[-1] if self._running else 'the model'} has dropout {where}, which draws other masks "
                "than one process: type --exact_dropout, or set its probability to 0"
            )


def check_no_dropout(model: nn.Module) -> None:
    """Raises UsageError for a module with dropout. It does not see `torch.nn.functional.dropout`."""
    for name, module in model.named_modules():
        # Modules of transformers that drop in attention alone have no nn.Dropout.
        probability = module.p if isinstance(module, _DropoutNd) else getattr(module, "attention_dropout", 0)
        if isinstance(probability, float) and probability > 0:
            raise UsageError(
                f"{name or 'the model'} has dropout, which --compile does not support where processes divide layers or "
                "the chain of layers: set its probability to 0, or type --exact_dropout in place of --compile"
            )
