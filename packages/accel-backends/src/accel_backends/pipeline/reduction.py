"""Average of the gradients of a pipeline's stages over data-parallel ranks after each backward."""

from typing import TYPE_CHECKING, final
from weakref import ref

import torch

from accel_backends.ops.averaging import average_gradients
from accel_backends.pipeline.model import PipelinedModel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@final
class DataParallelReduction:
    """Averages a model's gradients over ranks with the same stages and other samples.

    ``group``: these ranks. Gradients of sharded stages are reduced to shards.
    """

    def __init__(self, model: PipelinedModel, group: "ProcessGroup") -> None:
        self._model, self._group = ref(model), group

    @property
    def model(self) -> PipelinedModel | None:
        """The model; None if it has been deleted."""
        return self._model()

    def prepare(self, loss: torch.Tensor) -> None:
        """Does nothing: gradients are averaged after the backward."""

    def finish(self) -> None:
        """Averages the gradients, unless the backward added none, or ran under ``no_sync``.

        The mean of gradients that are means already and of later ones is the mean of all. A parameter that another
        rank has used gets a gradient here too.

        Collective: every rank of the group must call this.
        """
        model = self._model()
        if model is None or not model.reduced or not model.unreduced:
            return
        model.unreduced = False
        if model.shards is not None:
            model.shards.reduce()
            return
        # The means of the parts of a tensor-parallel gradient are the parts of its mean.
        average_gradients([one for one in model.parameters() if one.requires_grad], self._group)
