"""The sections in the order in which they run: the first are the last to be dropped when time is short."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """A module of this folder with a function ``run(bench)``, and the seconds that it may take on a GPU.

    Attributes:
        tiny_seconds: limit of the test of the driver itself, on a machine that others use too.
    """

    name: str
    seconds: int
    text: str
    tiny_seconds: int = 90


SECTIONS = (
    Section("machine", 12, "versions, and rates of the machine: copies, arithmetic, disks"),
    Section("tests", 75, "tests with the marker gpu", tiny_seconds=150),
    Section("syncs", 20, "waits of the host for the device, by kind of loop, with file and line"),
    Section("steps", 95, "a training step: raw PyTorch, accel, Accelerate, Fabric"),
    Section("transfer", 30, "copies of batches under the step, and their values"),
    Section("async_save", 60, "stall and correctness of asynchronous saves"),
    Section("planner", 40, "predicted and measured peak of memory"),
    Section("ranks", 35, "two ranks on one GPU: tests with the marker gpu_ranks"),
    Section("compilation", 60, "torch.compile by mode, with accumulation"),
    Section("fp8", 75, "fp8 against torchao by hand", tiny_seconds=180),
    Section("offload", 30, "offload to the host, and the search for a micro-batch"),
    Section("inference", 28, "models whose weights are in host memory or on disk"),
    Section("sync_save", 20, "save and load against torch.save and the links"),
    Section("scaling", 10, "the loss scale against torch.amp.GradScaler"),
    Section("profiling", 10, "the profiler's shares, counted communication, device facts"),
)
BY_NAME = {section.name: section for section in SECTIONS}
