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

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from adasum_hvd.distributed import adasum_replicate

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


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=2, help="ranks of one replica")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--save", type=Path, help="folder of the checkpoint to write")
    parser.add_argument("--resume", type=Path, help="folder of the checkpoint to read")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(42)
    shape = dist.get_world_size() // arguments.shards, arguments.shards
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))

    model = GPT()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["shard"])
    replicas = adasum_replicate(model, mesh["replica"])
    optimizer = torch.optim.AdamW(model.parameters(), arguments.lr)
    first = 0
    if arguments.resume:
        weights, state = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": state, "step": 0}
        checkpoint.load(saved, checkpoint_id=arguments.resume)
        set_state_dict(
            model, optimizer,
            model_state_dict=saved["model"], optim_state_dict=saved["optimizer"],
        )  # fmt: skip
        first = saved["step"]

    text = corpus()
    for step in range(first, first + arguments.steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10_000 * step + dist.get_rank())
        for last in (False, True):  # two passes a step, reduced once
            starts = torch.randint(len(text) - CONTEXT - 1, (8, 1), generator=generator)
            replicas.set_requires_gradient_sync(last)
            loss = model(text[starts + torch.arange(CONTEXT + 1)]) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49:
            dist.all_reduce(total := 2 * loss.detach())
            if dist.get_rank() == 0:
                print(f"step {step + 1}: loss {total / dist.get_world_size():.3f} nats")
    if arguments.save:
        weights, state = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": state, "step": step + 1}
        checkpoint.save(saved, checkpoint_id=arguments.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
