"""``accelerate launch`` as functions: what the command line, a file and a caller give."""

import importlib
import os
import sys

import pytest

from accel_compat.commands.launching import launch_command, launch_command_parser, validate_launch_command


@pytest.mark.parametrize("form", ["--num_processes", "--num-processes"])
def test_options_are_written_with_underscores_or_hyphens(form):
    args = launch_command_parser().parse_args([form, "4", "--multi-gpu", "a.py", "--num-processes", "7"])
    assert (args.num_processes, args.multi_gpu, args.use_fsdp) == (4, True, False)
    assert (args.training_script, args.training_script_args) == ("a.py", ["--num-processes", "7"])


def test_the_help_shows_one_form_of_each_option():
    text = launch_command_parser().format_help()
    assert "--main_process_port" in text
    assert "--main-process-port" not in text


def test_a_given_option_overrides_the_file_and_others_are_the_files(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("distributed_type: 'NO'\nnum_processes: 1\nmixed_precision: bf16\ndebug: true\n")
    args = launch_command_parser().parse_args(["--config_file", str(file), "--num_processes", "2", "a.py"])
    args, defaults, from_elsewhere = validate_launch_command(args)
    assert (args.num_processes, args.mixed_precision, args.debug) == (2, "bf16", True)
    assert (defaults.num_processes, from_elsewhere) == (1, True)


def test_an_unknown_key_of_the_file_is_an_error_of_the_caller(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("num_proceses: 1\n")
    with pytest.raises(ValueError, match=r"num_proceses.*did you mean num_processes"):
        launch_command(launch_command_parser().parse_args(["--config_file", str(file), "a.py"]))


def test_a_started_script_resolves_accelerate_to_accel_and_its_status_is_that_of_the_call(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "a.py").write_text(
        "import accelerate, sys\nassert 'accel_compat' in accelerate.__file__\nsys.exit(3)\n"
    )
    args = launch_command_parser().parse_args(["--cpu", str(tmp_path / "a.py")])
    with pytest.raises(SystemExit, match="3"):
        launch_command(args)


def test_the_command_of_mpirun_has_the_hosts_of_the_file(monkeypatch):
    launch = importlib.import_module("accelerate.utils.launch")
    monkeypatch.setattr(launch, "which", lambda name: name)
    monkeypatch.setattr(launch.subprocess, "check_output", lambda words: b"Intel MPI")
    words = ["--num_processes", "8", "--num_machines", "2", "--mpirun_hostfile", "hosts", "a.py", "-x"]
    command, env = launch.prepare_simple_launcher_cmd_env(launch_command_parser().parse_args(words))
    assert command == ["mpirun", "-f", "hosts", "-ppn", "4", "-n", "8", sys.executable, "a.py", "-x"]
    assert env["PATH"] == os.environ["PATH"]


def test_torchruns_options_are_set_on_the_arguments():
    launch = importlib.import_module("accelerate.utils.launch")
    args = launch_command_parser().parse_args(["--num_processes", "4", "--main_process_port", "0", "a.py"])
    launch.prepare_multi_gpu_env(args)
    assert (args.nproc_per_node, args.nnodes) == ("4", "1")
    assert int(args.master_port) > 0


def test_arguments_of_a_script_become_values():
    convert = importlib.import_module("accelerate.utils.launch")._convert_nargs_to_dict
    assert convert(["--a", "True", "--b", "-3", "--c", "5e-5", "--d", "x"]) == {"a": True, "b": -3, "c": 5e-5, "d": "x"}
    assert convert(["--a", "--b", "2"]) == {"a": True, "b": 2}
    with pytest.raises(ValueError, match="two ways"):
        convert(["--a", "--b", "False"])
