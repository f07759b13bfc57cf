"""Helpers of FSDP that clients call."""

import os


def enable_fsdp_ram_efficient_loading() -> None:
    """Lets only rank 0 read pretrained weights."""
    os.environ.setdefault("ACCELERATE_USE_FSDP", "True")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Lets every rank read pretrained weights."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"
