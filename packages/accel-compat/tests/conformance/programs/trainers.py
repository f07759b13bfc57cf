"""Client: Trainer of transformers on a tiny causal language model, in the variants that are named.

trainers.py VARIANT...
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import clients
import torch
import transformers
from torch.utils.data import IterableDataset

STEPS = 12
transformers.logging.set_verbosity_error()


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The rows, one after the other, without a length."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rows = clients.Rows(192)
        return (rows[index] for index in range(len(rows)))


def arguments(folder: Path, **given: Any) -> Any:
    """Arguments with a global batch of 8 samples at each micro-step, whatever the processes."""
    common: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8 // clients.world_size(),
        "max_steps": STEPS,
        "learning_rate": 5e-3,
        "warmup_steps": 2,
        "logging_steps": 3,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "seed": 7,
        "disable_tqdm": True,
    }
    return transformers.TrainingArguments(**{**common, **given})


def trained(given: Any, rows: Any = None, **more: Any) -> tuple[Any, dict[str, Any]]:
    """A trainer that has trained, and what it logged."""
    trainer = transformers.Trainer(
        model=clients.tiny_model(), args=given, train_dataset=clients.Rows(192) if rows is None else rows, **more
    )
    trainer.train()
    assert trainer.state.global_step == STEPS
    return trainer, {"losses": clients.losses(trainer)}


def plain(folder: Path) -> Mapping[str, Any]:
    trainer, found = trained(arguments(folder))
    trainer.save_model(str(folder / "final"))
    if clients.rank() == 0:
        saved = transformers.LlamaForCausalLM.from_pretrained(folder / "final").state_dict()
        here = trainer.accelerator.unwrap_model(trainer.model).state_dict()
        assert all(torch.equal(saved[name], here[name]) for name in saved)
    return found


def accumulation(folder: Path) -> Mapping[str, Any]:
    return trained(arguments(folder, gradient_accumulation_steps=2))[1]


def bf16(folder: Path) -> Mapping[str, Any]:
    return trained(arguments(folder, bf16=True))[1]


def evaluation(folder: Path) -> Mapping[str, Any]:
    given = arguments(folder, eval_strategy="steps", eval_steps=6, per_device_eval_batch_size=5)
    trainer, found = trained(given, eval_dataset=clients.Rows(37, seed=1))
    predicted = trainer.predict(clients.Rows(37, seed=1)).predictions
    return {**found, "evaluated": clients.losses(trainer, "eval_loss"), "predicted": list(predicted.shape)}


def iterable(folder: Path) -> Mapping[str, Any]:
    given = arguments(folder, accelerator_config={"dispatch_batches": True, "split_batches": False})
    return trained(given, Stream())[1]


def split(folder: Path) -> Mapping[str, Any]:
    given = arguments(folder, accelerator_config={"split_batches": True}, per_device_train_batch_size=8)
    return trained(given)[1]


def grouped(folder: Path) -> Mapping[str, Any]:
    return trained(arguments(folder, train_sampling_strategy="group_by_length"))[1]


def compiled(folder: Path) -> Mapping[str, Any]:
    return trained(arguments(folder, torch_compile=True, torch_compile_backend="eager"))[1]


def resume(folder: Path, **more: Any) -> Mapping[str, Any]:
    """Trains, and trains again from a checkpoint in the middle with other initial weights."""
    given = arguments(folder, save_strategy="steps", save_steps=6, gradient_accumulation_steps=2, **more)
    trainer, found = trained(given)
    if more.get("deepspeed"):
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)
    again = transformers.Trainer(model=clients.tiny_model(seed=99), args=given, train_dataset=clients.Rows(192))
    again.train(resume_from_checkpoint=str(folder / "checkpoint-6"))
    local = [one.to_local() if hasattr(one, "to_local") else one for one in trainer.model_wrapped.parameters()]
    held = sum(one.numel() * one.element_size() for one in local)
    wrapped = type(trainer.model_wrapped).__name__
    return {**found, "resumed": clients.losses(again)[-2:], "wrapped": wrapped, "bytes": clients.of_all_ranks(held)}


def fsdp2(folder: Path) -> Mapping[str, Any]:
    options = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "reshard_after_forward": True}
    return resume(folder, fsdp=True, fsdp_config={**options, "state_dict_type": "FULL_STATE_DICT"})


def fsdp2_sharded(folder: Path) -> Mapping[str, Any]:
    options = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "reshard_after_forward": True}
    return resume(folder, fsdp=True, fsdp_config={**options, "state_dict_type": "SHARDED_STATE_DICT"})


def deepspeed(folder: Path, stage: int = 2) -> Mapping[str, Any]:
    auto = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    config = {
        "zero_optimization": {"stage": stage},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {**auto, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
    }
    return resume(folder, deepspeed=config)


def deepspeed1(folder: Path) -> Mapping[str, Any]:
    return deepspeed(folder, 1)


def deepspeed3(folder: Path) -> Mapping[str, Any]:
    return deepspeed(folder, 3)


VARIANTS = {
    one.__name__: one
    for one in (
        *(plain, accumulation, bf16, evaluation, iterable, split, grouped, compiled, resume),
        *(fsdp2, fsdp2_sharded, deepspeed, deepspeed1, deepspeed3),
    )
}

if __name__ == "__main__":
    clients.run(VARIANTS, sys.argv[1:])
