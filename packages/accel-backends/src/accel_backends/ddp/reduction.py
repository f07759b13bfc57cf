"""Reduction of a DDP model's gradients after each backward, parameters that the loss did not reach included."""

import re
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any, final
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_backends.ops.averaging import average_tensors
from accel_backends.ops.fqn import named_parameters, sparse_embeddings
from accel_precision.scaler import GradientMarks, gradient_marks
from accel_state.errors import BackendError

# Part of torch's error that lists, by index, the parameters without a gradient in a backward.
_WITHOUT = re.compile(r"Parameter indices which did not receive grad for rank \d+:((?: \d+)+)")
# Value of ``require_forward_param_sync`` from a backward to the next forward, and before the first forward: the reducer
# has to be prepared again for another backward. Each forward sets True. torch treats either value as true.
_SPENT = 1


@final
class Reduction:
    """Makes DDP's reducer reduce all gradients of one model in every synchronising backward.

    By itself the reducer expects, once after each forward, a backward with gradients of all parameters that were
    trainable when it was built. If a backward leaves parameters out, their buckets stay unreduced on this rank, other
    ranks wait for the all-reduce, and torch raises an error in the next forward. Here each missing parameter gets a
    gradient of -0.0 in the same backward, which changes no sum. A gradient that is -0.0 in all elements afterwards
    belongs to a parameter that no rank used; it is deleted, as there is none in one process.

    Args:
        model: the DDP model.
        group: its process group.
        given: the user wrapped the model, and may have frozen or unfrozen parameters since.

    Attributes:
        recorded: a synchronising backward has run, in which torch records a static graph.
    """

    __slots__ = ("_aside", "_before", "_expected", "_group", "_marks", "_model", "_others", "_sparse", "recorded")

    def __init__(self, model: DistributedDataParallel, group: Any = None, *, given: bool = False) -> None:
        model.__dict__["require_forward_param_sync"] = _SPENT  # the first backward may go through another method
        self._group = group
        self.recorded = False
        # Marks of the gradients before the last backward, if it was prepared here, not by a forward of the model; None
        # once it has reached a parameter.
        self._marks: GradientMarks | None = None
        # With a static graph: marks of the gradients before a backward that follows no forward of this model.
        self._before: GradientMarks | None = None
        # Within a join: the gradients of earlier micro-batches, while a backward reduces its own.
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._expected: list[torch.Tensor] = []  # in the reducer's order, which its parameter indices refer to
        self._others: list[torch.Tensor] = []
        self._sparse = _sparse(model)
        reduced = _in_reducer(model) if given and not self._sparse else None
        for parameter in model._module_parameters:  # without those that DDP ignores
            expected = parameter.requires_grad if reduced is None else id(parameter) in reduced
            (self._expected if expected else self._others).append(parameter)
        self._model = ref(model, partial(_empty, (self._expected, self._others)))

    @property
    def model(self) -> DistributedDataParallel | None:
        """The DDP model; None if it has been deleted."""
        return self._model()

    def prepare(self, loss: torch.Tensor) -> None:
        """Prepares the reducer for a backward, unless the last forward did and no backward has followed it.

        With a static graph the reducer counts the gradients of one backward for each forward and cannot be prepared
        again; ``finish`` refuses a second backward.

        Raises:
            BackendError: a second backward within ``join``, in which ranks without batches repeat one backward per
                forward.
        """
        model = self._model()
        if model is None or not model.require_backward_grad_sync:
            return
        self._marks = None
        if model.require_forward_param_sync is True:
            self._set_aside(model)
            return
        if model.static_graph:
            if model.require_forward_param_sync is _SPENT:
                self._before = gradient_marks(self._expected)
            return
        if model._join_config.enable and model.require_forward_param_sync is _SPENT:
            raise BackendError(
                "join_uneven_inputs follows one backward for each forward of a model, and this is another after the "
                "same forward; nearest: add the losses up and call backward once"
            )
        self._set_aside(model)
        self._marks = gradient_marks(self._expected)
        model._has_rebuilt_buckets = model.reducer._rebuild_buckets() or model._has_rebuilt_buckets
        model.reducer.prepare_for_backward([loss] if model.find_unused_parameters else [])

    def settle(self) -> None:
        """Ends the preparation of a backward that reached no parameter, because the next one is under ``no_sync``.

        Otherwise the reducer would reduce the gradients of that one. With ``find_unused_parameters`` it would also
        count all parameters as unused in the first of its gradients, and raise an error at the second. What earlier
        backwards of the window have left is reduced here.
        """
        model = self._model()
        if model is None or self._marks is None or model.require_forward_param_sync is True:
            return
        self._marks = None
        without = [parameter for parameter in self._expected if parameter.grad is None]
        self._add_nothing(self._expected, model.reducer if model.find_unused_parameters else None)
        if without:
            _drop_nothing(without)

    def finish(self) -> None:
        """Reduces, after a backward, the parameters that it left out and those that were frozen when DDP was built.

        Raises:
            BackendError: with a static graph, gradients of this model from a backward without its own forward.
        """
        model = self._model()
        if model is None or not model.require_backward_grad_sync:
            return
        before, self._before = self._before, None
        if before is not None:
            if gradient_marks(self._expected) != before:
                raise BackendError(
                    "static_graph=True: torch reduces one backward for each forward of the prepared model, and this is "
                    "another after the same forward, or one through another method; nearest: add the losses up and "
                    "call backward once, or leave static_graph out"
                )
            return
        self.recorded = True
        self._complete(model)
        self._add_aside()
        if self._marks is not None and gradient_marks(self._expected) != self._marks:
            self._marks = None
        model.__dict__["require_forward_param_sync"] = _SPENT
        for parameter in self._others:
            if parameter.requires_grad:
                self._average_thawed(model)
                break

    def _set_aside(self, model: DistributedDataParallel) -> None:
        """Within a join, leaves the next backward only its own gradients to reduce.

        Ranks without batches add zeros to those, also where they were part of what the window has accumulated.
        """
        self._aside.clear()  # of a backward that failed
        for parameter in self._expected if model._join_config.enable else ():
            if (held := parameter.grad) is not None:
                self._aside.append((parameter, held.clone() if model.gradient_as_bucket_view else held))
                parameter.grad = None

    @torch.no_grad()
    def _add_aside(self) -> None:
        while self._aside:
            parameter, held = self._aside.pop()
            parameter.grad = held if parameter.grad is None else parameter.grad.add_(held)

    def _complete(self, model: DistributedDataParallel) -> None:
        """Adds gradients of -0.0 where the reducer still waits for a gradient, and deletes those that no rank used.

        torch's error lists at most 100 parameters, so several passes may be necessary.
        """
        without: list[torch.Tensor] = []
        passed: set[int] = set()
        while missing := self._missing(model):
            if passed.issuperset(map(id, missing)):
                raise BackendError("DistributedDataParallel waits for gradients that it has been given")
            passed.update(map(id, missing))
            without += [parameter for parameter in missing if parameter.grad is None]
            self._add_nothing(missing)
        if without:
            _drop_nothing(without)

    def _add_nothing(self, parameters: Sequence[torch.Tensor], unprepared: Any = None) -> None:
        """Passes the reducer gradients of -0.0, those of frozen parameters included.

        ``unprepared``: the reducer, if it has to be prepared for a backward that reaches all of these parameters.
        """
        frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        _set_requires_grad(frozen, True)
        if unprepared is not None:
            unprepared.prepare_for_backward([parameter.view_as(parameter) for parameter in parameters])
        torch.autograd.backward(parameters, [_nothing(parameter, self._sparse) for parameter in parameters])
        _set_requires_grad(frozen, False)

    def _missing(self, model: DistributedDataParallel) -> list[torch.Tensor]:
        """Returns the first 100 parameters whose gradients the reducer waits for; none if it has reduced all."""
        try:
            model.reducer._check_reducer_finalized()
        except RuntimeError as error:
            found = _WITHOUT.search(str(error))
            if found is None:
                raise BackendError(f"DistributedDataParallel has not reduced all gradients: {error}") from error
            return [self._expected[int(index)] for index in found[1].split()]
        return []

    def _average_thawed(self, model: DistributedDataParallel) -> None:
        """Averages unfrozen parameters that the reducer does not have."""
        thawed = [parameter for parameter in self._others if parameter.requires_grad]
        if model._join_config.enable:
            names = [name for name, one in named_parameters(model).items() if any(one is other for other in thawed)]
            raise BackendError(
                f"join_uneven_inputs cannot average gradients of parameters that were frozen when prepare was called: "
                f"{', '.join(names[:10])}; set requires_grad before prepare"
            )
        _average(thawed, self._group, self._sparse)


@final
class BareReduction:
    """Averages the gradients of a model that was frozen when it was prepared, and so has no reducer, once it trains.

    Attributes:
        synchronising: whether a backward averages.
    """

    __slots__ = ("_group", "_model", "_parameters", "_sparse", "synchronising")

    def __init__(self, model: nn.Module, group: Any = None) -> None:
        self.synchronising = True
        self._group = group
        self._parameters: list[torch.Tensor] = list(model.parameters())
        self._sparse = _sparse(model)
        self._model = ref(model, partial(_empty, (self._parameters,)))

    @property
    def model(self) -> nn.Module | None:
        """The user's own module; None if it has been deleted."""
        return self._model()

    @property
    def thawed(self) -> list[torch.Tensor]:
        """The parameters that have been unfrozen."""
        return [parameter for parameter in self._parameters if parameter.requires_grad]

    def prepare(self, loss: torch.Tensor) -> None:
        """Does nothing: there is no reducer."""

    def finish(self) -> None:
        """Averages, after a backward, the gradients of unfrozen parameters."""
        if self.synchronising and (thawed := self.thawed):
            _average(thawed, self._group, self._sparse)


def _average(thawed: Sequence[torch.Tensor], group: Any, sparse: Collection[int]) -> None:
    """Averages gradients that no reducer has; the mean of means is the same mean."""
    without = [parameter for parameter in thawed if parameter.grad is None]
    for parameter in without:
        parameter.grad = _nothing(parameter, sparse)
    average_tensors([parameter.grad for parameter in thawed if parameter.grad is not None], group)
    if without:
        _drop_nothing(without)


def _sparse(model: nn.Module) -> set[int]:
    """Returns the ids of the parameters with sparse gradients."""
    return {id(module.weight) for _, module in sparse_embeddings(model)}


def _nothing(parameter: torch.Tensor, sparse: Collection[int]) -> torch.Tensor:
    """Returns the gradient of an unused parameter: -0.0, or a sparse tensor without elements."""
    if id(parameter) not in sparse:
        return torch.zeros_like(parameter).neg_()
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(indices, parameter.new_empty((0, *parameter.shape[1:])), parameter.shape)


def _in_reducer(model: DistributedDataParallel) -> set[int]:
    """Returns the ids of the parameters that the reducer was built for; not available for sparse parameters."""
    return {id(one) for bucket in model.reducer._get_zeros_like_grad_buckets() for one in bucket.parameters()}


def _empty(lists: Iterable[list[torch.Tensor]], _: object) -> None:
    """Clears the lists of parameters of a model that has been deleted."""
    for parameters in lists:
        parameters.clear()


def _set_requires_grad(parameters: Iterable[torch.Tensor], value: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad_(value)


@torch.no_grad()
def _drop_nothing(parameters: Sequence[torch.Tensor]) -> None:
    """Deletes gradients that are -0.0 in all elements or have no elements."""
    device = parameters[0].device  # one device, so that there is one synchronisation
    unused = torch.stack([_is_nothing(parameter.grad).to(device) for parameter in parameters])
    for parameter, nothing in zip(parameters, unused.tolist(), strict=True):
        if nothing:
            parameter.grad = None


def _is_nothing(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    if gradient.is_sparse:
        return torch.tensor(gradient._nnz() == 0)
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return ((real == 0) & torch.signbit(real)).all()
