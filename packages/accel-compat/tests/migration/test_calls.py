"""Calls that mean something else: each rule reports its place, and ordinary training gives no finding."""

from pathlib import Path

import pytest

from accel_compat.migration.differences import DIFFERENCES
from accel_compat.migration.script import check_script

IMPORT = "from accel import Accelerator\n"
MADE = "from accelerate import Accelerator\naccelerator = Accelerator({})\n"
SCHEDULE = MADE.format("") + "s = accelerator.prepare(scheduler)\n"
ACCUMULATING = MADE.format("") + "with accelerator.accumulate(model):\n    accelerator.backward(loss)\n"

FOUND = [
    ("several-accelerators", MADE.format("") + "other = Accelerator()\n", (3, 9)),
    (
        "scheduler-factor",
        MADE.format("") + "s = get_scheduler('x', o, num_training_steps=n * accelerator.num_processes)\n",
        (3, 46),
    ),
    ("scheduler-steps", SCHEDULE + "scheduler.step()\n", (4, 1)),
    ("short-window", MADE.format("gradient_accumulation_steps=args.steps"), (2, 55)),
    ("short-window", "from accelerate.utils import GradientAccumulationPlugin as P\nP(num_steps=2)\n", (2, 1)),
    ("sp-loss", "from accelerate import ParallelismConfig\nParallelismConfig(sp_size=2)\n", (2, 27)),
    ("sp-loader", "import accelerate\naccelerate.ParallelismConfig(sp_size=2)\n", (2, 38)),
    ("separate-windows", ACCUMULATING + "with accelerator.accumulate(critic):\n    pass\n", (5, 6)),
    ("clip-in-window", ACCUMULATING + "    accelerator.clip_grad_norm_(p, 1)\n", (5, 5)),
    ("prepared-twice", MADE.format("") + "a = accelerator.prepare(model)\nb = accelerator.prepare(model)\n", (4, 5)),
    ("load-state", "def f(accelerator):\n    accelerator.load_state(x)\n", (2, 5)),
    ("load-state", "def f(self):\n    self.accelerator.load_state(x)\n", (2, 5)),
    ("position", MADE.format("") + "accelerator.skip_first_batches(l, 3)\n", (3, 1)),
    ("in-order", "DataLoader(d, in_order=False)\n", (1, 24)),
    ("save-state", "from accel import Accelerator as A\nx = A()\nx.save_state('f')\n", (3, 1)),
    ("save-in-window", "accelerator.backward(l)\naccelerator.save_state('f')\no.step()\n", (2, 1)),
    ("custom-objects", "accelerator.register_for_checkpointing(x)\n", (1, 1)),
    ("save-pickle", "accelerator.save(x, os.path.join(a, 'x.pt'))\n", (1, 1)),
    ("save-path", "accelerator.save(x, path)\n", (1, 1)),
    ("unsafe-model", "accelerator.save_model(m, d, safe_serialization=False)\n", (1, 1)),
    ("split-batches", MADE.format("split_batches=True"), (2, 41)),
    ("reduce-scale", "accelerator.reduce(x, scale=2)\n", (1, 29)),
    ("fp16-cpu", MADE.format("cpu=True, mixed_precision='fp16'"), (2, 53)),
    ("tensorboard-folder", MADE.format("log_with=['tensorboard']"), (2, 36)),
    ("each-node", "from accelerate.utils import ProjectConfiguration as P\nP('x', save_on_each_node=True)\n", (2, 26)),
    ("environment", "os.environ.get('ACCELERATE_USE_FSDP')\n", (1, 1)),
    ("environment", "x = os.environ['FSDP_VERSION']\n", (1, 5)),
    ("own-state", "from accelerate.state import AcceleratorState\nAcceleratorState._reset_state()\n", (2, 1)),
    ("own-state", "accelerator.state._reset_state()\n", (1, 1)),
    ("state-of", "from accelerate.state import AcceleratorState as S\nS().device\n", (2, 1)),
    ("attribute", "if accelerator.native_amp:\n    pass\n", (1, 4)),
    ("member", "from accelerate import DistributedType as D\nD.TPU\n", (2, 1)),
    ("argument", MADE.format("megatron_lm_plugin=p"), (2, 46)),
    ("argument", "accelerator.save_state(d, safe_serialization=False)\n", (1, 46)),
    ("position-of-argument", MADE.format("True, False, 'no', 1, True, None, plugin"), (2, 61)),
    ("version", "import accelerate\naccelerate.__version__\n", (2, 1)),
    ("text", "import_module('accelerate.utils')\n", (1, 15)),
    ("text", "run(['accelerate', 'launch'])\n", (1, 6)),
]


def findings(tmp_path: Path, text: str) -> list[tuple[str, tuple[int, int]]]:
    script = tmp_path / "script.py"
    script.write_text(text)
    report = check_script(script)
    assert not report.error
    return [(one.rule, (one.line, one.column)) for one in report.findings if one.kind != "rename"]


@pytest.mark.parametrize(("rule", "text", "place"), FOUND, ids=lambda one: one if isinstance(one, str) else None)
def test_a_difference_is_found_at_its_place(tmp_path, rule, text, place):
    assert (rule, place) in findings(tmp_path, text)


def test_every_rule_has_an_example():
    assert {one.rule for one in DIFFERENCES} == {rule for rule, _, _ in FOUND}


@pytest.mark.parametrize(
    "text",
    [
        MADE.format("mixed_precision='bf16'") + "model, o, l = accelerator.prepare(model, o, l)\nfor b in l:\n"
        "    accelerator.backward(model(b))\n    o.step()\n    o.zero_grad()\n"
        "    accelerator.print(accelerator.gather_for_metrics(b))\naccelerator.end_training()\n",
        IMPORT + "if a:\n    accelerator = Accelerator(cpu=True)\nelse:\n    accelerator = Accelerator()\n",
        IMPORT + "def f():\n    return Accelerator()\ndef g():\n    return Accelerator()\n",
        ACCUMULATING + "    if accelerator.sync_gradients:\n        accelerator.clip_grad_norm_(p, 1)\n",
        "from accel import Accelerator, DataLoaderConfiguration\n"
        "Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True), scheduler_steps='per_process')\n",
        "accelerator.save({'a': t}, f'{folder}/x.safetensors')\n",
        "os.environ['ACCELERATE_LOG_LEVEL'] = 'info'\n",
        "optimizer.step()\nscheduler.step()\n",
        "s = get_scheduler('x', o, num_training_steps=n * epochs)\n",
        "o.config_name = a.state._reset_state\n",
        "accelerator.backward(l)\no.step()\naccelerator.save_state\n",
        "accelerator.config, accelerator.policy, accelerator.my_own_attribute\n",
        "from elsewhere import Accelerator\nAccelerator(unknown=1)\n",
        "'''accelerate launch is a command'''\n",
    ],
)
def test_what_means_the_same_gives_no_finding(tmp_path, text):
    assert findings(tmp_path, text) == []


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (MADE.format("torch_tp_plugin=p"), "parallelism_config=ParallelismConfig(tp_size=...)"),
        (MADE.format("fsdp_plugins=p"), "the nearest is fsdp_plugin"),
        ("from accelerate import DistributedType as D\nD.MULTI_GPUS\n", "the nearest is MULTI_GPU"),
        ("from accelerate.utils import set_seed\nset_seed(0, specific=True)\n", "device_specific"),
        ("accelerator.lomo_backward(l, 0.1)\n", "it wrapped LOMO's optimizers"),
    ],
)
def test_the_remedy_names_what_accel_has(tmp_path, text, remedy):
    script = tmp_path / "script.py"
    script.write_text(text)
    assert any(remedy in one.remedy for one in check_script(script).findings)
