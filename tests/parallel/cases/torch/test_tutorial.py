"""The tutorial on an ImageNet folder: exact resume, other boost settings, bad folders."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import resnet50_imagenet
import torch
from PIL import Image

import adasum_hvd.torch as hvd
from adasum_hvd import boost

MANUAL = {"mode": "manual", "less_bn": False, "grad_freeze": False}
ADASUM = {
    "boost": {**MANUAL, "adasum": True},
    "common": {"device_number": 1},
}
ACCUMULATION = {
    "boost": {**MANUAL, "adasum": False, "grad_accumulation": True},
    "grad_accumulation": {"grad_accumulation_step": 2},
}
SMALL = (
    "--width 0.03125 --image-size 32 --batch-size 4 --epochs 2 --warmup-epochs 1 --lr 0.1 "
    "--workers 0 --classes 4 --boost-level O2"
)


def init() -> None:
    hvd.init(group_op="average", group_size=1)


def start() -> None:
    global folder
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp()))
    if hvd.rank() == 0:
        random = np.random.default_rng(0)
        for part, count in (("train", 10), ("val", 3)):
            for label in range(4):
                (folder / part / f"n0{label}").mkdir(parents=True)
                for index in range(count):
                    pixels = random.integers(0, 60, (48, 40, 3)) + 60 * label
                    image = Image.fromarray(pixels.astype(np.uint8))
                    image.save(folder / part / f"n0{label}" / f"{index}.JPEG")
    hvd.barrier()


def train(config: dict, *more: str) -> resnet50_imagenet.Training:
    words = [*SMALL.split(), "--data-path", str(folder), "--boost-config"]
    arguments = resnet50_imagenet.parse([*words, json.dumps(config), *more])
    switch = boost.switch(
        arguments.boost_level, arguments.boost_config, gradients_mean=True
    )
    training = resnet50_imagenet.Training(arguments, switch)
    training.resume()
    training.run()
    return training


def same(a, b) -> bool:
    """Return whether two models and optimizers are bit for bit the same."""
    states = [(t.model.state_dict(), t.optimizer.state_dict()["state"]) for t in (a, b)]
    flat = [torch.utils._pytree.tree_leaves(state) for state in states]
    assert len(flat[0]) == len(flat[1]) > 100
    return all(torch.equal(torch.as_tensor(x), torch.as_tensor(y))
               for x, y in zip(*flat, strict=True))  # fmt: skip


def case_resume_is_exact() -> None:
    whole = train(ADASUM)
    assert whole.step == 2 * whole.steps_per_epoch == 10
    checkpoints = folder / "checkpoints"
    # Stopped inside an epoch, then at its end, then to the end; fresh objects each time.
    # Processes that read ahead change nothing.
    for stop, expected, workers in (("3", 3, "1"), ("5", 5, "0"), ("10", 10, "0")):
        options = ("--max-steps", stop, "--workers", workers)
        resumed = train(ADASUM, "--checkpoint", str(checkpoints), *options)
        assert resumed.step == expected
        hvd.barrier()
        names = {path.name for path in checkpoints.glob("step-*")}
        assert names == {f"step-{expected}"}
    assert same(whole, resumed)
    with pytest.raises(
        RuntimeError, match=r"expected a checkpoint of lr=0\.3, but got 0\.1"
    ):
        train(ADASUM, "--checkpoint", str(checkpoints), "--lr", "0.3")
    hvd.barrier()
    if hvd.rank() == 0:
        (checkpoints / "step-10" / f"rank-{hvd.size() - 1}.pt").unlink()
    hvd.barrier()
    with pytest.raises(RuntimeError, match=rf"first on rank {hvd.size() - 1}: FileNot"):
        train(ADASUM, "--checkpoint", str(checkpoints))


def case_accumulation_by_average() -> None:
    training = train(ACCUMULATION, "--loss-scale", "dynamic", "--amp", "bf16")
    assert training.steps_per_epoch == 4  # of 5: whole windows only
    assert training.optimizer._adasum.options.backward_passes_per_step == 2
    assert training.optimizer._reduces_gradients
    with pytest.raises(ValueError, match="expected multiples of 2"):
        train(ACCUMULATION, "--max-steps", "3")


def case_autocast_types() -> None:
    """The logits have the type that `--amp` names; the weights move, and alike everywhere."""
    short = ["--epochs", "1", "--loss-scale", "dynamic", "--amp"]
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        seen = set()
        hook = torch.nn.modules.module.register_module_forward_hook(
            lambda module, _, logits, seen=seen: (
                seen.add(logits.dtype) if isinstance(module, torch.nn.Linear) else None
            )
        )
        try:
            training = train(ADASUM, *short, name)
        finally:
            hook.remove()
        assert seen == {dtype}
        assert {p.dtype for p in training.model.parameters()} == {torch.float32}
        initial = torch.amp.GradScaler("cpu").get_scale()
        skipped = np.log2(initial / training.scale.get_scale())
        assert 0 <= skipped < training.step == training.steps_per_epoch
        momenta = [s["momentum_buffer"] for s in training.optimizer.state.values()]
        assert momenta and all(torch.isfinite(m).all() for m in momenta)


def case_loss_scale_changes_nothing() -> None:
    assert same(train(ADASUM), train(ADASUM, "--loss-scale", "1"))


def case_bad_data_is_an_error_on_all_ranks() -> None:
    with pytest.raises(ValueError, match="--batch-size: expected at most"):
        train(ADASUM, "--batch-size", "1000")
    with pytest.raises(ValueError, match="--classes: expected at least 4, but got 2"):
        train(ADASUM, "--classes", "2")
    nowhere = str(folder / ("nowhere" if hvd.rank() == 0 else ""))
    with pytest.raises(RuntimeError, match="reading the data failed on 1 of 2 ranks"):
        train(ADASUM, "--data-path", nowhere)
    hvd.barrier()
    if hvd.rank() == 0:
        shutil.rmtree(folder)
