"""A rank's part of `adasum-hvd doctor` for the engine on torch.distributed, under torchrun.

python -m adasum_hvd.tools.torch_distributed_selfcheck OUTPUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from adasum_hvd.distributed import adasum_all_reduce
from adasum_hvd.tools.selfcheck import inputs, is_right


def main() -> None:
    """Reduce on all ranks; rank 0 writes how many tensors were tried, and the wrong ones."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tried = inputs(ranks)
    wrong = []
    for name, tensors in tried.items():
        mine = torch.from_numpy(tensors[rank].copy())
        adasum_all_reduce(mine)
        if not is_right(mine.numpy(), tensors):
            wrong.append(name)
    of_all = [wrong] * ranks
    dist.all_gather_object(of_all, wrong)
    if rank == 0:
        names = sorted({name for names in of_all for name in names})
        found = {"ranks": ranks, "tried": len(tried), "wrong": names}
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
