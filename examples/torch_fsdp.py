"""Train a small GPT that is sharded by FSDP2, with AdaSum across replicas.

    torchrun --nproc-per-node 4 examples/torch_fsdp.py --shards 2 --save checkpoint
    torchrun --nproc-per-node 4 examples/torch_fsdp.py --shards 4 --resume checkpoint

Ranks form a mesh of replicas x shards. FSDP2 shards over the second dimension and averages the
gradients inside a replica. `adasum_replicate` reduces them across replicas. A distributed
checkpoint resumes on any number of shards.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from adasum_hvd.distributed import adasum_replicate, clip_grad_norm_

CONTEXT, WIDTH = 64, 32


class GPT(nn.Module):
    """A decoder on bytes: 44 thousand parameters."""

    def __init__(self, layers: int = 2):
        super().__init__()
        self.token, self.position = (
            nn.Embedding(256, WIDTH),
            nn.Embedding(CONTEXT, WIDTH),
        )
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 2, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss, in nats, on bytes [batch, CONTEXT + 1]."""
        x = self.token(tokens[:, :-1]) + self.position(torch.arange(CONTEXT))
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return functional.cross_entropy(logits, tokens[:, 1:].flatten())


def corpus() -> torch.Tensor:
    """Return the bytes of Python's own standard library, int64 [length]."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.tensor(list(b"\n".join(path.read_bytes() for path in files[:80])))


def stateful(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the sharded state of both, as torch.distributed.checkpoint takes it."""
    names = "model", "optimizer"
    return dict(zip(names, get_state_dict(model, optimizer), strict=True))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=2, help="ranks of one replica")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--save", help="folder of the checkpoint to write")
    parser.add_argument("--resume", help="folder of the checkpoint to read")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(42)
    shape = dist.get_world_size() // arguments.shards, arguments.shards
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))
    model = GPT()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["shard"])
    adasum_replicate(model, mesh["replica"])
    optimizer = torch.optim.AdamW(model.parameters(), arguments.lr)
    saved = stateful(model, optimizer) | {"step": 0}
    if arguments.resume:
        checkpoint.load(saved, checkpoint_id=arguments.resume)
        set_state_dict(
            model, optimizer,
            model_state_dict=saved["model"], optim_state_dict=saved["optimizer"],
        )  # fmt: skip
    text, begun = corpus(), saved["step"]
    for step in range(begun + 1, begun + arguments.steps + 1):
        generator = torch.Generator().manual_seed(10_000 * step + dist.get_rank())
        starts = torch.randint(len(text) - CONTEXT - 1, (16, 1), generator=generator)
        optimizer.zero_grad()
        loss = model(text[starts + torch.arange(CONTEXT + 1)])
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == begun + arguments.steps:
            dist.all_reduce(mean := loss.detach() / dist.get_world_size())
            if dist.get_rank() == 0:
                print(f"step {step}: loss {mean:.3f} nats", flush=True)
    if arguments.save:
        saved = stateful(model, optimizer) | {"step": step}
        checkpoint.save(saved, checkpoint_id=arguments.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
