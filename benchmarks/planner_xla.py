"""The planner's predictions for XLA against the buffers that its compiler assigns on virtual CPU devices."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, parser
from benchmarks.planner import SHAPES, differences, loss_of

DEVICES = 4
_RUN = "from benchmarks.planner_xla import measured; measured(*__import__('sys').argv[1:])"


def compared(shape: str, strategy: str, *, precision: str = "no") -> dict[str, Any]:
    """Predicts and measures one strategy in a process of its own, which writes down what XLA's compiler assigns."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_backend_optimization_level=0 --xla_dump_to={folder} --xla_dump_hlo_as_text"
        env = os.environ | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(DEVICES), "XLA_FLAGS": flags}
        root = Path(__file__).parents[1]
        command = [sys.executable, "-c", _RUN, shape, strategy, precision]
        done = subprocess.run(command, env=env, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
        row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        row["measured"]["peak"] = max(
            int(found[1])
            for report in Path(folder).glob("*memory-usage-report.txt")
            if (found := re.search(r"Total bytes used: (\d+)", report.read_text()))
        )
    return row


def measured(shape: str, strategy: str, precision: str) -> None:
    """Trains three steps and prints bytes of each part on one device, predicted and counted."""
    import torch
    import torch_xla.core.xla_model as xla_model
    from torch_xla.distributed.spmd import XLAShardedTensor

    from accel import Accelerator
    from accel_backends import build_options, load_backend
    from accel_backends.xla.backend import shard_batch
    from accel_planner import Hardware, candidates, optimizer_facts, plan_memory, profile_model
    from accel_planner.candidate import named

    def held(tensors: Any) -> int:
        xla_model.wait_device_ops()
        locals_ = [XLAShardedTensor(one).local_shards[0].data if shards and one.dim() else one for one in tensors]
        return sum(one.nbytes for one in locals_)

    (candidate,) = named(candidates(DEVICES, kind="xla"), [strategy])
    shards = bool(candidate.options["shard_parameters"])
    chosen = SHAPES[shape]
    batch, source = chosen.batch, chosen.build()
    accelerator = Accelerator(strategy=build_options(load_backend("xla"), candidate.options), mixed_precision=precision)
    profile = profile_model(source, batch, loss=loss_of, policy=precision, device_type="xla")
    stepping = torch.optim.AdamW(source.parameters(), lr=0.01)
    plan = plan_memory(
        profile, optimizer_facts(stepping, profile.parameters), Hardware.of_xla(DEVICES, 2**34), candidate
    )
    model, stepping = accelerator.prepare(source, stepping)
    for _ in range(3):
        rows = shard_batch([torch.cat([one] * DEVICES).to(accelerator.device) for one in batch])
        accelerator.backward(loss_of(model, tuple(rows)))
        stepping.step()
        gradients = held([one.grad for one in model.parameters() if one.grad is not None])
        stepping.zero_grad()
    states = [value for state in stepping.optimizer.state.values() for value in state.values()]
    counted = {"parameters": held(model.parameters()), "gradients": gradients, "optimizer": held(states)}
    predicted = {name: getattr(plan.parts, name) for name in counted} | {"peak": plan.peak}
    print(json.dumps({"predicted": predicted, "measured": counted}))


def main() -> None:
    args = parser(__doc__).parse_args()
    columns = ["shape", "strategy", "parameters_%", "gradients_%", "optimizer_%", "peak_%", "MB"]
    report = Report(f"Predicted against XLA's compiler on {DEVICES} virtual devices, off by percent", columns)
    for shape in ("mlp", "llama", "wide")[: 1 if args.quick else None]:
        for strategy in ("xla", "xla:shard"):
            row = compared(shape, strategy)
            off = {f"{part}_%": round(value, 2) for part, value in differences(row).items()}
            report.add(shape=shape, strategy=strategy, MB=round(row["measured"]["peak"] / 1e6, 1), **off)
    report.show(args.json)


if __name__ == "__main__":
    main()
