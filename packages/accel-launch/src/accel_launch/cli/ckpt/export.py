"""``accel ckpt export``, also known as ``accel merge-weights``."""

import rich_click as click

from accel_launch.cli.options import as_json
from accel_launch.cli.printing import print_json
from accel_state.sizes import readable_bytes


@click.command()
@click.argument("path")
@click.argument("out")
@click.option("--name", default="model", metavar="STATE", help="Which state to write; model if not given.")
@click.option("--max_shard_size", default="10GB", metavar="SIZE", help="Largest file, like 5GB or 500MiB.")
@as_json
def export(path: str, out: str, *, name: str, max_shard_size: str, as_json: bool) -> int:
    """Writes a model of the checkpoint at PATH to the folder or URL OUT, as plain safetensors files with an index.

    Other tools read these files. Shards of several ranks are merged into full tensors; memory holds one tensor at a
    time. Files of an earlier export of the same name are replaced, other files are kept.
    """
    from accel_ckpt import export_checkpoint
    from accel_ckpt.io.storage import storage_of

    files = export_checkpoint(path, out, max_shard_size, state=name)
    sizes = storage_of(files[0]).listing(files[0].parent)
    if as_json:
        print_json([{"path": str(file), "bytes": sizes[file.name]} for file in files])
    else:
        for file in files:
            print(f"wrote {file} ({readable_bytes(sizes[file.name] or 0)})")
    return 0


merge_weights = click.RichCommand(
    name="merge-weights", params=export.params, callback=export.callback, help=export.help
)
