"""What one machine of a TPU pod does, with a CPU device that computes alone: everything but what devices do as one.

torch_xla's CPU devices cannot be those of several processes, so each machine here gets the gradients of its own batch
alone, and both train on the same one. Writes what it found into a file named after its rank.
"""

import json
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import accel_backends.xla.backend
from accel import Accelerator
from accel_data.metrics import gather_for_metrics
from accel_state import BackendError, find_batch_size
from accel_state.rng import set_seed


def main(folder: Path) -> None:
    found = {}
    try:
        Accelerator()
    except BackendError as error:
        found["refusal"] = str(error)
    # From here on the runtime is believed to connect both machines.
    accel_backends.xla.backend.check_hosts = lambda *_: None
    accelerator = Accelerator()
    session, device = accelerator.session, accelerator.device
    set_seed(accelerator.process_index)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(torch.arange(10.0), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found["rows"], found["metrics"] = [], []
    for rows in loader:
        found["rows"].append(rows.tolist())
        accelerator.backward(model(torch.ones(find_batch_size(rows), 2, device=device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        found["metrics"] += accelerator.gather_for_metrics(rows.cpu()).tolist()
    accelerator.save_state(folder / "state")
    saved = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(folder / "state")
    loaded = accelerator.get_state_dict(model)
    found["loaded"] = all(torch.equal(value, loaded[name]) for name, value in saved.items())
    found["weights"] = {name: value.tolist() for name, value in saved.items()}
    own = torch.tensor([float(accelerator.process_index)])
    whole = torch.arange(4.0, device=device)
    if accelerator.is_main_process:
        accelerator.set_trigger()
    found |= {
        "place": [accelerator.process_index, accelerator.num_processes, accelerator.is_local_main_process],
        "host": [accelerator.gather(own).tolist(), accelerator.reduce(own, "sum").tolist()],
        "whole": [accelerator.gather(whole).tolist(), accelerator.reduce(whole, "sum", scale=2.0).tolist()],
        "padded": list(accelerator.pad_across_processes(whole).shape),
        "mixed": [one.tolist() for one in gather_for_metrics(session, (whole, own.repeat(2)), (2, 1), rows=2)],
        "first's": session.broadcast(own.to(device)).tolist(),
        "objects": accelerator.gather_for_metrics([accelerator.process_index], use_gather_object=True),
        "trigger": accelerator.check_trigger(),
    }
    set_seed(7, device_specific=True)
    found["drawn"] = [torch.rand(2).tolist(), torch.rand(2, device=device).tolist()]
    (folder / f"{accelerator.process_index}.json").write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
