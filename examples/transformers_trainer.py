"""Train a tiny transformer with Hugging Face's Trainer and AdaSum's hook.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py

The model is made on the spot, of random weights, and so is the text: sums of two digits, which it
learns to write down. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from adasum_hvd.distributed import check_replicas
from adasum_hvd.integrations.transformers import AdasumCallback

PLUS, EQUALS, VOCABULARY = 19, 20, 21  # after the numbers 0 to 18


def sums() -> list[dict[str, torch.Tensor]]:
    """Return `a + b = c` for all digits; only c is to be learnt."""
    rows = [
        torch.tensor([a, PLUS, b, EQUALS, a + b]) for a in range(10) for b in range(10)
    ]
    ignored = torch.full((4,), -100)
    return [{"input_ids": row, "labels": torch.cat([ignored, row[4:]])} for row in rows]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", action="store_true", help="else the CPU")
    parser.add_argument("--epochs", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(42)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=8, n_embd=64, n_layer=2, n_head=4, bos_token_id=None,
        eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as directory:
        settings = TrainingArguments(
            output_dir=directory, num_train_epochs=arguments.epochs,
            per_device_train_batch_size=10, learning_rate=3e-3, use_cpu=not arguments.cuda,
            ddp_backend=None if arguments.cuda else "gloo", save_strategy="no", report_to=[],
            disable_tqdm=True,
        )  # fmt: skip
        callback = AdasumCallback()
        Trainer(model, settings, train_dataset=sums(), callbacks=[callback]).train()
    rows = torch.stack([row["input_ids"] for row in sums()])
    model = model.cpu().eval()
    with torch.no_grad():
        right = model(rows).logits[:, -2].argmax(-1) == rows[:, -1]
    check_replicas(model)
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} ranks, {callback.state.passes} passes reduced by AdaSum"
        )
        print(f"sums that are right: {right.float().mean().item():.3f}", flush=True)


if __name__ == "__main__":
    main()
