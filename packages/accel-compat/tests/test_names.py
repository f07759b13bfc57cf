"""Every public class, function and constant of Accelerate 1.15 can be imported from the module that defines it there.

``data/names_1_15.txt`` has one line for each module: its own names, and for a package those that it imports from its
modules. Left out are loggers and other variables in lower case, and six constants of parts that are written in another
way here: USE_TORCH_XLA, FORMAT (of log lines), TORCH_SAFE_GLOBALS, ARGUMENT_KEY_MAPPING and ARGUMENT_VALUE_MAPPING (of
to-fsdp2), and MODEL_CONFIGS_TO_MEGATRON_PARSERS.
"""

import importlib
from pathlib import Path

import pytest

LINES = (Path(__file__).parent / "data" / "names_1_15.txt").read_text(encoding="utf-8").splitlines()
NAMES = {module: names.split() for module, names in (line.split(":") for line in LINES)}


@pytest.mark.parametrize("module", NAMES)
def test_a_module_has_the_names_of_accelerate(module):
    found = importlib.import_module("accelerate" if module == "." else f"accelerate.{module}")
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []


def test_constants_have_the_values_of_accelerate():
    import torch
    from accelerate.utils.constants import STR_OPERATION_TO_FUNC
    from accelerate.utils.modeling import WEIGHTS_INDEX_NAME
    from accelerate.utils.operations import TENSOR_INT_TO_DTYPE, TENSOR_TYPE_TO_INT

    assert [compare(1, 2) for compare in map(STR_OPERATION_TO_FUNC.get, (">", ">=", "==", "!=", "<=", "<"))] == [
        *(False, False, False),
        *(True, True, True),
    ]
    assert WEIGHTS_INDEX_NAME == "pytorch_model.bin.index.json"
    assert TENSOR_INT_TO_DTYPE[TENSOR_TYPE_TO_INT[torch.bfloat16]] == torch.bfloat16


def test_small_functions_do_what_accelerates_do(monkeypatch):
    import socket

    import torch
    from accelerate.utils.bnb import get_parameter_device
    from accelerate.utils.launch import env_var_path_add
    from accelerate.utils.other import get_free_port, has_repeated_blocks, is_repeated_blocks

    monkeypatch.setenv("SOME_PATH", "/a::/b")
    assert env_var_path_add("SOME_PATH", Path("/c")) == "/a:/b:/c"
    with socket.socket() as probe:
        probe.bind(("", get_free_port()))
    blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(3, 3)])
    mixed = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.ReLU()])
    assert [is_repeated_blocks(one) for one in (blocks, mixed, blocks[0], torch.nn.ModuleList())] == [
        True,
        *[False] * 3,
    ]
    assert [has_repeated_blocks(torch.nn.Sequential(one)) for one in (blocks, mixed)] == [True, False]
    assert get_parameter_device(blocks) == torch.device("cpu")


def test_config_has_its_subcommands(tmp_path, capsys):
    import yaml
    from accelerate.commands.config import get_config_parser
    from accelerate.commands.config.update import update_config

    path = tmp_path / "old.yaml"
    path.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 2\n")
    args = get_config_parser().parse_args(["update", "--config_file", str(path)])
    assert (args.subcommand, update_config(args)) == ("update", str(path))
    assert yaml.safe_load(path.read_text())["num_processes"] == 2
    with pytest.raises(ValueError, match=r"missing\.yaml does not exist; nearest: accelerate config default"):
        update_config(get_config_parser().parse_args(["update", "--config_file", str(tmp_path / "missing.yaml")]))
