"""`TrainStep`: forward, backward, clipping and the optimizer's step as one program, with the user's own objects."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.exc import Unsupported, UserError
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from pure_backend.calls.plan import Bordered
from pure_backend.calls.specializations import Specializations
from pure_backend.errors import ImpureFunctionError, UnsupportedOperatorError
from pure_backend.options import Options
from pure_backend.pipeline import normalize, prepare
from pure_backend.transforms.capture import Captured
from pure_backend.transforms.distributed_batches import parts_of_batch
from pure_backend.transforms.micro_batches import MicroBatches
from pure_backend.transforms.step_plan import Rules, StepPlan
from pure_backend.transforms.updates import Updates


class TrainStep:
    """A whole training step, called as `loss = step(*batch)`.

    It does what this loop does, in one program for each signature of the batch:

        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        optimizer.step()

    Model and optimizer stay what they are: `state_dict`, `param_groups`, learning-rate schedulers, checkpoints and an eager
    loop before or after see nothing of it. Hyper-parameters are inputs of the program, so a new learning rate compiles nothing.
    Gradients live inside of the program only: `.grad` is None after a step, whatever was there before.

    Args:
        model: The model.
        optimizer: One of torch's, or any whose `step` Dynamo can capture whole, over parameters of the model.
        loss_fn: Called as `loss_fn(model(*inputs), target)`, the target being the last tensor of the batch; or, if its first
            parameter is called `model`, as `loss_fn(model, *batch)`; None if the model itself returns the loss.
        grad_accumulation: How many micro-batches each batch is split into, along the first dimension of its tensors. The loss
            is the mean of theirs, their gradients add up to its gradient, and buffers are updated by one after the other.
        clip_grad_norm: The largest norm of all gradients together, as for `torch.nn.utils.clip_grad_norm_`.
        has_aux: Whether the loss function returns `(loss, aux)`; then so does the step. With accumulation the tensors of `aux`
            are those of all micro-batches, stacked.
        donate: On plain tensors, whether parameters, buffers and states may get new memory (nothing is copied then), as long as
            no other tensor shows theirs; else new values are copied into it. On `xla` tensors they always keep their buffers.
        check_finite: Whether a loss or a gradient that is NaN or infinite raises, before anything is updated. On `xla` tensors
            this waits for each step.
        batch: For a model of DTensors, how the batch lies: each rank gives its own part of `Shard(0)`, on the first axis of the
            mesh, or of a placement for each axis. By default every rank gives the whole batch.
        options: See `Options`.

    Raises:
        TypeError: An optimizer, hook or module that cannot be part of a program; the message names it.
        ValueError: The optimizer has parameters that are not the model's.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> step = TrainStep(model, torch.optim.AdamW(model.parameters()), nn.functional.mse_loss)
        >>> loss = step(torch.ones(8, 4), torch.zeros(8, 2))
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any] | None = None,
        *,
        grad_accumulation: int = 1,
        clip_grad_norm: float | None = None,
        has_aux: bool = False,
        donate: bool = True,
        check_finite: bool = False,
        batch: Any = None,
        options: Options | Mapping[str, Any] | None = None,
    ) -> None:
        _check_objects(model, optimizer, loss_fn)
        if not isinstance(grad_accumulation, int) or grad_accumulation < 1:
            raise ValueError(f"TrainStep: grad_accumulation must be a positive int, got {grad_accumulation!r}")
        self.model = model
        self.optimizer = optimizer
        self.options = dataclasses.replace(Options.of(options), on_impure="error")
        if self.options.verify is not False:
            raise ValueError("TrainStep: option 'verify' is not for training steps")
        self._rules = Rules(donate, check_finite, self.options.remat)
        self._loss = _loss_of_batch(model, loss_fn, has_aux)
        self._graphs: weakref.WeakKeyDictionary[Callable[..., Any], Specializations] = weakref.WeakKeyDictionary()
        self._captured = Captured(backend=_weakly(self._compile), dynamic=False)
        self._updates = Updates(optimizer, None if clip_grad_norm is None else float(clip_grad_norm))
        self._batches = MicroBatches(grad_accumulation)
        self._parts = parts_of_batch(model, batch, grad_accumulation)
        self._bytes_copied = 0

    @property
    def bytes_copied(self) -> int:
        """How many bytes of parameters, buffers and states the latest step copied; 0 where all got their new memory."""
        return self._bytes_copied

    def _copied(self, count: int) -> None:
        self._bytes_copied = count

    @torch.compiler.disable
    def __call__(self, *batch: Any, **keywords: Any) -> Any:
        """One step.

        Args:
            *batch: What the loss function is given; tensors may be nested in tuples, lists and dicts.
            **keywords: Keywords of the model, or of a loss function that is given the model.

        Returns:
            The loss, detached, or `(loss, aux)`.

        Raises:
            ImpureFunctionError: The loss cannot be one program; the message has the reason and the line.
            ValueError: The batch cannot be split.
            FloatingPointError: See `check_finite`.
        """
        _check_hooks(self.optimizer)
        self._bytes_copied = 0
        own, own_keywords = pytree.tree_map(self._batches.first, self._distributed((batch, keywords)))
        try:
            with torch.enable_grad():
                result = self._captured(self._loss, *own, **own_keywords)
        except (Unsupported, UserError) as error:
            raise ImpureFunctionError(f"TrainStep: the loss cannot be one program: {error}") from error
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler looks for
        for hook in self.optimizer._optimizer_step_post_hooks.values():
            hook(self.optimizer, (), {})
        return result

    def _distributed(self, batch: Any) -> Any:
        return batch if self._parts is None else pytree.tree_map(self._parts, batch)

    def planned(self, *batch: Any, **keywords: Any) -> tuple[StepPlan, Sequence[Any]]:
        """The plan of a call with this batch and the arguments of its graph; nothing is run and nothing changes.

        Raises:
            ImpureFunctionError: As for a call.
        """
        own, own_keywords = pytree.tree_map(self._batches.first, (batch, keywords))
        found: list[tuple[StepPlan, Sequence[Any]]] = []

        def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            normalized = normalize(gm)

            def stop(*args: Any) -> Any:
                args = (*args, *normalized.read_lifted())
                found.append((self._plan(normalized.gm, args), args))
                raise _Planned

            return stop

        try:
            with torch.enable_grad():
                Captured(backend=backend, dynamic=False)(self._loss, *own, **own_keywords)
        except _Planned:
            return found[0]
        except (Unsupported, UserError) as error:
            raise ImpureFunctionError(f"TrainStep: the loss cannot be one program: {error}") from error
        raise ValueError("TrainStep: the loss computes nothing with tensors")

    def _compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend that runs the step where Dynamo wants the loss."""
        normalized = normalize(gm)

        def make(args: Sequence[Any]) -> Any:
            return self._plan(normalized.gm, args)

        specializations = Specializations(normalized, make, _never_cut, self.options)
        call = _weakly(specializations.__call__)
        self._graphs[call] = specializations
        return call

    def _plan(self, gm: fx.GraphModule, args: Sequence[Any]) -> Any:
        """The plan of a call of the loss's graph."""
        trainable = list(self._trainable())
        prepared = prepare(gm, args, self.options, alone=[*trainable, *filter(self._batches.knows, args)])
        border = prepared.border
        if border is not None and border.carriers:
            raise UnsupportedOperatorError("TrainStep: a parameter that is a tensor subclass is trained: freeze it")
        inputs = args if border is None else border.enter(args)
        plan = StepPlan(prepared, inputs, trainable, self._updates, self._batches, self._rules, self._copied)
        return plan if border is None else Bordered(plan, border)

    def _trainable(self) -> Iterator[torch.Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]
        if self._updates.max_norm is not None:
            yield from self.model.parameters()


class _Planned(Exception):
    """Raised in place of a step that is only planned."""


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method that does not keep its object: Dynamo keeps what it calls, and a step is to be freed with its model."""
    known = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound: Any = known()
        return bound(*args)

    return call


def _never_cut(impurities: Sequence[Any]) -> Any:
    raise AssertionError("a training step is never cut into stages")


def _loss_of_batch(model: nn.Module, loss_fn: Callable[..., Any] | None, has_aux: bool) -> Callable[..., Any]:
    """The function that Dynamo captures."""
    takes_model = loss_fn is not None and _takes_model(loss_fn)

    def loss_of_batch(*batch: Any, **keywords: Any) -> Any:
        if loss_fn is None:
            result = model(*batch, **keywords)
        elif takes_model:
            result = loss_fn(model, *batch, **keywords)
        else:
            result = loss_fn(model(*batch[:-1], **keywords), batch[-1])
        if not has_aux:
            return result
        loss, aux = result
        return loss, aux

    return loss_of_batch


def _takes_model(loss_fn: Callable[..., Any]) -> bool:
    try:
        first = next(iter(inspect.signature(loss_fn).parameters), None)
    except ValueError:  # a builtin without a signature
        return False
    return first == "model"


def _check_objects(model: nn.Module, optimizer: Any, loss_fn: Any) -> None:
    if isinstance(optimizer, torch.amp.GradScaler) or _scaler_of(loss_fn):
        raise TypeError(
            "TrainStep: a GradScaler looks at gradients between backward and step, which are one program here: train in "
            "bfloat16, which needs no scaling"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"TrainStep: the optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            f"TrainStep: {name} calls a closure as often as it likes, which no single program can: step it in eager"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise TypeError(f"TrainStep: {name} is for sparse gradients, which JAX does not have")
    for path, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise TypeError(f"TrainStep: module {path!r} gives sparse gradients, which JAX does not have: use sparse=False")
    _check_wrappers(model)
    own = {id(parameter) for parameter in model.parameters()}
    for i, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise TypeError(f"TrainStep: {name} has differentiable=True, but a step has no gradient")
        strange = [tuple(parameter.shape) for parameter in group["params"] if id(parameter) not in own]
        if strange:
            raise ValueError(f"TrainStep: group {i} of {name} has parameters that are not the model's, of shapes {strange[:4]}")
    _check_hooks_of_parameters(model)


def _scaler_of(loss_fn: Any) -> bool:
    """Whether a loss function reads a GradScaler that is on."""
    if not inspect.isfunction(loss_fn):
        return False
    read = inspect.getclosurevars(loss_fn)
    values = [*read.nonlocals.values(), *read.globals.values()]
    return any(isinstance(value, torch.amp.GradScaler) and value.is_enabled() for value in values)


def _check_wrappers(model: nn.Module) -> None:
    """Refuse models whose wrapper works in hooks between forward, backward and update."""
    for path, module in model.named_modules():
        names = {base.__name__ for base in type(module).__mro__ if base.__module__.startswith("torch.")}
        if names & _WRAPPERS.keys():
            wrapper = _WRAPPERS[min(names & _WRAPPERS.keys())]
            named = f"module {path!r}" if path else "the model"
            raise TypeError(
                f"TrainStep: {named} is wrapped by {wrapper}, which sends parameters or gradients in the middle of a step, "
                "and here that is one program: keep the wrapper and the loop and compile the model, "
                "torch.compile(model, backend='assume_pure'), or give TrainStep the model without the wrapper"
            )


_WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "FSDPModule": "fully_shard",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
}


def _check_hooks(optimizer: Optimizer) -> None:
    if optimizer._optimizer_step_pre_hooks:
        raise TypeError("TrainStep: a step pre-hook of the optimizer sees gradients, which exist inside of the program only")


def _check_hooks_of_parameters(model: nn.Module) -> None:
    for path, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise TypeError(
                f"TrainStep: parameter {path!r} has a gradient hook, but gradients exist inside of the program only"
            )
