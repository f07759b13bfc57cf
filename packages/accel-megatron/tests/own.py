"""Forward steps, models and data sets of a user's own, and the same in one process."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from accel_megatron import GPTTrainStep, avg_losses_across_data_parallel_group

ALPHA, PARTS = 0.5, 2


class WeightedStep(GPTTrainStep):
    """Losses of samples, weighted by how often they have token 7 or a lower one."""

    def __init__(self, args: Any, alpha: float) -> None:
        self.alpha = alpha
        super().__init__(args)

    def get_loss_func(self) -> Any:
        def loss_func(tokens, loss_mask, output):
            losses = (output.float() * loss_mask).sum(1)
            loss = (losses * weights(tokens, self.alpha)).mean()
            averaged = avg_losses_across_data_parallel_group([loss])
            return loss, {"lm loss": averaged[0], "samples": losses.detach()}

        return loss_func

    def get_forward_step_func(self) -> Any:
        def forward_step(data_iterator, model):
            tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
            output = model(tokens, position_ids, attention_mask, labels=labels)
            return output, partial(self.loss_func, tokens, loss_mask)

        return forward_step


def weights(tokens: torch.Tensor, alpha: float = ALPHA) -> torch.Tensor:
    return 1 + alpha * (tokens < 8).sum(1)


def losses_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sums of the losses of each sample's tokens, in one process."""
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    found = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=-100)
    return found.view(targets.shape).sum(1)


class Weighted(nn.Module):
    """The weighted loss in one process: the mean over micro-batches."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> Any:
        losses = losses_of(self.model, batch) * weights(batch["input_ids"])
        return SimpleNamespace(loss=torch.stack([part.mean() for part in losses.chunk(PARTS)]).mean())


def replica_of(one: Any, options: dict[str, Any]) -> tuple[int, int]:
    """This rank's replica, and the number of replicas."""
    shared = options.get("tp_degree", 1) * options.get("context_parallel_size", 1)
    replicas = one.num_processes // (shared * options.get("pp_degree", 1))
    return one.process_index // shared % replicas, replicas
