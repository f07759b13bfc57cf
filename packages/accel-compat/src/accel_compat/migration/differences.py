"""Table of the differences that ``accel migrate`` reports, and of those that no source shows.

``subject`` is the first column of docs/reference/differences.md, whose rows are those of this table and of ``UNSEEN``.
"""

from dataclasses import dataclass
from typing import final

from accel_compat.migration.findings import Kind


@final
@dataclass(frozen=True, slots=True)
class MigrationRule:
    """A difference that a source shows.

    Attributes:
        rule: its name in reports.
        subject: row of the page about intended differences; empty: no row, because a name or an argument is missing.
        kind: whether accel refuses the call, or gives it another meaning.
        message: the difference; ``{}`` is the call, name or value.
        remedy: what to do.
    """

    rule: str
    subject: str
    kind: Kind
    message: str
    remedy: str


DIFFERENCES = (
    MigrationRule(
        "several-accelerators",
        "several Accelerators in a process",
        "note",
        "a second Accelerator shares nothing with the first",
        "prepare each model with the Accelerator that trains it",
    ),
    MigrationRule(
        "scheduler-factor",
        "",
        "change",
        "steps of a schedule are multiplied by {}, and accel steps it once per optimizer step",
        'remove the factor, or give Accelerator(scheduler_steps="per_process")',
    ),
    MigrationRule(
        "scheduler-steps",
        "`scheduler.step()`",
        "note",
        "{} moves once per optimizer step, not once per process",
        'count optimizer steps in the schedule, or give Accelerator(scheduler_steps="per_process")',
    ),
    MigrationRule(
        "short-window",
        "last short accumulation window",
        "note",
        "the last window of an epoch is divided by the micro-batches that it holds",
        "remove a correction that the script makes for it",
    ),
    MigrationRule(
        "sp-loss",
        "loss under `sp_size` with DeepSpeed",
        "note",
        "backward weighs the loss of each rank by its tokens",
        "backward(loss, weight=1) for a loss that the script averages over the group",
    ),
    MigrationRule(
        "sp-loader",
        "loaders under `sp_size`",
        "note",
        "ranks of a sequence-parallel group read the same batches",
        "count steps by data-parallel ranks: accelerator.data_shard.count",
    ),
    MigrationRule(
        "separate-windows",
        "`accumulate(a)` and `accumulate(b)` in one loop",
        "note",
        "each has an accumulation window of its own",
        "one accumulate(a, b) counts them together",
    ),
    MigrationRule(
        "clip-in-window",
        "`clip_grad_norm_` inside a window",
        "note",
        "{} clips only at the end of a window, and measures before",
        "nothing, unless gradients are to be clipped in each micro-batch",
    ),
    MigrationRule(
        "prepared-twice",
        "preparing a model twice",
        "change",
        "{} is prepared a second time, which is an error",
        "remove the second call",
    ),
    MigrationRule(
        "load-state",
        "random state, loader, scaler at `load_state`",
        "note",
        "load_state restores everything, or fails with what does not fit",
        "accel ckpt import FOLDER OUT makes a checkpoint of a folder that Accelerate wrote",
    ),
    MigrationRule(
        "position",
        "position in the data",
        "note",
        "load_state restores the position in the data, so that the loader goes on at the next sample",
        "iterate the loader itself after load_state; skip_first_batches counts from the start of the epoch, as before",
    ),
    MigrationRule(
        "in-order",
        "`in_order=False` of a DataLoader",
        "note",
        "in_order=False is set back, with a warning",
        "remove it; prefetch_factor hides slow samples",
    ),
    MigrationRule(
        "save-state",
        "`save_state`",
        "note",
        "save_state writes other files, and commits them by a rename",
        "read weights with load_model, or write them with save_model; accel ckpt show prints what a checkpoint holds",
    ),
    MigrationRule(
        "save-in-window",
        "`save_state` between `backward` and `optimizer.step()`",
        "change",
        "save_state between backward and optimizer.step() is refused",
        "save after the step",
    ),
    MigrationRule(
        "custom-objects",
        "custom objects in checkpoints",
        "note",
        "registered objects are saved as tensors and JSON, without pickle",
        "return tensors, numbers, texts, and dicts and lists of them from state_dict",
    ),
    MigrationRule(
        "save-pickle",
        "`save(obj, f)`",
        "change",
        "accelerator.save writes safetensors, not {}",
        "give named tensors and a path that ends in .safetensors, or call torch.save on the main process",
    ),
    MigrationRule(
        "save-path",
        "",
        "note",
        "accelerator.save writes safetensors",
        "the path has to end in .safetensors, and the object to be a dict of tensors",
    ),
    MigrationRule(
        "unsafe-model",
        "",
        "change",
        "safe_serialization=False of {} would write a pickle, which is refused",
        "leave it out; torch.save(accelerator.get_state_dict(model), path) writes a pickle",
    ),
    MigrationRule(
        "split-batches",
        "`split_batches=` on the constructor",
        "note",
        "split_batches= of the constructor has an effect: the batch size is that of all ranks together",
        "remove it if the batch size is that of one rank",
    ),
    MigrationRule(
        "reduce-scale",
        "`reduce(scale=)`",
        "note",
        "scale= multiplies the result on every device",
        "remove it if the script scales the result itself",
    ),
    MigrationRule(
        "fp16-cpu",
        "fp16 on a CPU",
        "note",
        "fp16 on a CPU computes in fp16, with loss scaling",
        'mixed_precision="bf16" or "no"',
    ),
    MigrationRule(
        "tensorboard-folder",
        "TensorBoard's event files",
        "note",
        "event files are in a folder of each run, <logging_dir>/<project>/<run>",
        "point TensorBoard at <logging_dir>",
    ),
    MigrationRule(
        "each-node",
        "`project_config.save_on_each_node` with `save_state`",
        "note",
        "every node keeps a full, verified copy of the checkpoint",
        "remove it if the nodes share a file system",
    ),
    MigrationRule(
        "environment",
        "environment variables",
        "note",
        "{} is set by the launcher if at all, never by the constructor",
        "read accelerator.config, or the property of the Accelerator",
    ),
    MigrationRule(
        "own-state",
        "",
        "change",
        "{} is a private name of Accelerate's shared state, which accel does not have",
        "make a new Accelerator, which shares no state with others",
    ),
    MigrationRule(
        "state-of",
        "",
        "change",
        "{}() belongs to an Accelerator, and cannot be made without one",
        "accelerator.state or accelerator.gradient_state; PartialState() for the processes",
    ),
    MigrationRule("attribute", "", "change", "accel's Accelerator has no {}", ""),
    MigrationRule("member", "", "change", "accel has no {}", ""),
    MigrationRule("argument", "", "change", "accel has no argument {}", ""),
    MigrationRule("position-of-argument", "", "change", "{} is another argument in accel", "pass it by name"),
    MigrationRule(
        "version",
        "",
        "note",
        "__version__ is that of accel, not of an Accelerate",
        "remove comparisons with versions of Accelerate",
    ),
    MigrationRule(
        "text",
        "",
        "note",
        "the text {} names Accelerate",
        "write accel if it is a module, a command or a distribution that is looked up",
    ),
)
"""Differences that are reported."""

_NUMBERS = "the numbers become those of one process; the source stays"
_FASTER = "only memory, time or an error message differ; the source stays"
_SERVED = "accel trains where Accelerate refuses; the source stays"
_STARTED = "the command line decides, not the source"

UNSEEN = {
    "`backward(loss, weight=n)`": "an addition",
    "`get_state_dict` under AutoTP of DeepSpeed": "DeepSpeed's configuration decides",
    "DDP and parameters that a step does not use": _NUMBERS,
    "a second backward of one forward under DDP, `trigger_sync_in_backward` after `no_sync`": _NUMBERS,
    "`zero_grad()` before the backward of a window's last micro-batch": _NUMBERS,
    "`optimizer.step(closure)` inside a window": _NUMBERS,
    "`break` out of a loader": _NUMBERS,
    "`scheduler.step()` after the loop over a loader": _NUMBERS,
    "`sp_size` without DeepSpeed": _SERVED,
    '`sp_backend="deepspeed"` without a DeepSpeed plugin or `strategy="deepspeed"`': _SERVED,
    "torchrun on a CPU box": _STARTED,
    "`accel launch --cpu --num_processes 2`": _STARTED,
    "`num_processes` of `accel launch --tpu`": _STARTED,
    "settings": _STARTED,
    "offloaded weights": _FASTER,
    "weights of a checkpoint that the map places on disk": _FASTER,
    "a model with offloaded weights in two threads": _FASTER,
    "a checkpoint with another shape": _FASTER,
    "buffers of a module that `infer_auto_device_map` divides": _FASTER,
    "`init_empty_weights`": _FASTER,
    "`prepare_pippy`": "what it splits is known when it is called, and what it cannot split is refused",
}
"""Rows of the page that are not reported, with the reason."""

ARGUMENTS = {
    ("Accelerator", "megatron_lm_plugin"): "strategy=MegatronLMPlugin(...), of accel_megatron",
    ("Accelerator", "logging_dir"): "project_config=ProjectConfiguration(logging_dir=...)",
    ("Accelerator", "fp16"): 'mixed_precision="fp16"',
    ("Accelerator", "dispatch_batches"): "dataloader_config=DataLoaderConfiguration(dispatch_batches=...)",
    ("Accelerator", "even_batches"): "dataloader_config=DataLoaderConfiguration(even_batches=...)",
    ("Accelerator", "use_seedable_sampler"): "dataloader_config=DataLoaderConfiguration(use_seedable_sampler=...)",
    ("save_state", "safe_serialization"): "leave it out; checkpoints are safetensors and JSON",
    ("load_state", "load_kwargs"): "leave it out; load_state(strict=False, parts=...) loads some of the parts",
}
"""What to write instead of an argument that accel lacks, by callable and name."""


def by_rule(rule: str) -> MigrationRule:
    """The difference of this name."""
    return next(one for one in DIFFERENCES if one.rule == rule)
