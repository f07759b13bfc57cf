"""``accel ckpt reshard``."""

import rich_click as click

from accel_launch.cli.options import as_json
from accel_launch.cli.printing import print_json
from accel_state.sizes import readable_bytes


@click.command()
@click.argument("path")
@click.argument("out")
@click.option("--files", type=click.IntRange(min=1), required=True, metavar="N", help="Files of tensors to write.")
@as_json
def reshard(path: str, out: str, *, files: int, as_json: bool) -> int:
    """Rewrites the checkpoint at PATH to OUT, with its tensors sharded into N files.

    Any number of ranks reads any number of files; N ranks of FSDP then read one file each. Memory holds one shard of a
    tensor at a time.
    """
    import accel_ckpt

    with accel_ckpt.reshard(path, out, files) as written:
        sizes = {name: record.size for name, record in sorted(written.manifest.files.items())}
    if as_json:
        print_json({"path": str(written.path), "bytes": sum(sizes.values()), "files": sizes})
    else:
        print(f"wrote {written.path} ({readable_bytes(sum(sizes.values()))} in {len(sizes)} files)")
    return 0
