"""Backend of a run: accel's parts, opened from Accelerate's options."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from accel.setup.build import Components, open_parts
from accel_backends.ddp.config import DistributedDataParallelKwargs
from accel_compat.options.handlers import CompatAutocastKwargs, CompatDDPKwargs, CompatGradScalerKwargs
from accel_precision import AutocastKwargs, GradScalerKwargs

TRANSLATED: dict[type, type] = {
    CompatAutocastKwargs: AutocastKwargs,
    CompatDDPKwargs: DistributedDataParallelKwargs,
    CompatGradScalerKwargs: GradScalerKwargs,
}


def translate(handler: Any) -> Any:
    """Returns accel's options with the values of Accelerate's, also of a subclass."""
    kind = next(kind for given, kind in TRANSLATED.items() if isinstance(handler, given))
    names = {one.name for one in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in vars(handler).items() if name in names})


def open_backend(
    *,
    precision: str,
    cpu: bool,
    device_type: str,
    handlers: Iterable[Any],
    strategy: Any,
    plugins: dict[str, Any],
    parallelism: Any,
) -> Components:
    """Opens accel's parts for a run with these options.

    fp16 on a CPU is computed in fp32, as Accelerate does; with DeepSpeed the preparation of a model refuses it.
    """
    if precision == "fp16" and device_type == "cpu":
        precision = "no"
    return open_parts(
        {
            "mixed_precision": precision,
            "gradient_accumulation_steps": 1,
            "cpu": cpu or device_type == "cpu",
            "debug": None,
            "project_dir": None,
        },
        accumulation=None,
        handlers=[translate(one) for one in handlers if isinstance(one, tuple(TRANSLATED))],
        loading=(None, None),
        parallelism=parallelism,
        project=None,
        strategy=strategy,
        plugins=plugins,
    )
