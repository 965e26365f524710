"""ImageNet folders, digits and synthetic images, divided over the ranks.

An example is asked for by (epoch, index), and what is random about it depends on these two
and the seed alone: any worker process gives the same, and a resumed run continues exactly.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler

MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
STD = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
EXTENSIONS = (".jpeg", ".jpg", ".png")
VALIDATION_FOLDERS = ("validation_preprocess", "val", "validation")
Key = tuple[int, int]  # epoch, index


class ImageFolder(Dataset):
    """Images in one folder per class, cropped and flipped at random when `train`.

    Args:
        root: holds one folder per class; labels count the folders in alphabetical order.
        size: height and width of what comes out, in pixels.
        train: random crop of 8 to 100 % of the area and flip; else the central crop of the
            image scaled to 8/7 of `size` (256 for 224).
        seed: of the random crops and flips.

    Raises:
        FileNotFoundError: no such folder, or no images in it.
    """

    def __init__(self, root: Path, size: int, train: bool, seed: int):
        if not root.is_dir():
            raise FileNotFoundError(
                f"{root}: expected a folder with one folder per class"
            )
        self.classes = sorted(path.name for path in root.iterdir() if path.is_dir())
        self.files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((root / name).iterdir())
            if path.suffix.lower() in EXTENSIONS
        ]
        if not self.files:
            raise FileNotFoundError(
                f"{root}: expected {', '.join(EXTENSIONS)} files in one folder per class, "
                f"but got none in {len(self.classes)} folders"
            )
        self._size, self._train, self._seed = size, train, seed

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: Key) -> tuple[torch.Tensor, int]:
        """Return a normalized image (3, size, size) and its label."""
        path, label = self.files[key[1]]
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except OSError as error:
            raise OSError(f"{path}: {error}") from error
        if self._train:
            random = np.random.default_rng([self._seed, *key])
            box, flip = _random_box(image.size, random), random.random() < 0.5
        else:
            box, flip = _central_box(image.size), False
        image = image.resize((self._size, self._size), Image.Resampling.BILINEAR, box)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        pixels = (pixels - MEAN) / STD
        return pixels.flip(2) if flip else pixels, label


Box = tuple[float, float, float, float]


def _random_box(size: tuple[int, int], random: np.random.Generator) -> Box:
    """Return a box of 8 to 100 % of the area and 3:4 to 4:3 in shape."""
    width, height = size
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = np.sqrt(area * ratio), np.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = random.uniform(0, width - w), random.uniform(0, height - h)
            return left, top, left + w, top + h
    return 0, 0, width, height


def _central_box(size: tuple[int, int]) -> Box:
    """Return the central square of 7/8 of the shorter side."""
    side = min(size) * 7 / 8
    left, top = ((length - side) / 2 for length in size)
    return left, top, left + side, top + side


class InMemory(Dataset):
    """Images (n, 3, height, width) and labels (n,) that fit into memory."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor):
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, key: Key) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an image and its label; nothing about them is random."""
        return self._images[key[1]], self._labels[key[1]]


def digits(size: int) -> tuple[Dataset, Dataset, int]:
    """Return scikit-learn's 1437 + 360 handwritten digits, grey as RGB, and 10.

    Raises:
        ModuleNotFoundError: scikit-learn, which brings the digits, is not installed.
    """
    # Its file is read directly: 16 ranks that import scikit-learn take half a minute.
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError(
            "--data digits: expected scikit-learn; pip install it"
        )
    path = Path(package.origin).parent / "datasets/data/digits.csv.gz"
    table = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.float32))
    images, labels = table[:, :-1].view(-1, 1, 8, 8) / 8 - 1, table[:, -1].long()
    images = torch.nn.functional.interpolate(images, (size, size), mode="bilinear")
    images = images.repeat(1, 3, 1, 1)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    train, test = order[:1437], order[1437:]
    return (
        InMemory(images[train], labels[train]),
        InMemory(images[test], labels[test]),
        10,
    )


def synthetic(
    size: int, examples: int = 1280, classes: int = 10
) -> tuple[Dataset, Dataset, int]:
    """Return noise around one random image per class: `examples` and a quarter of them."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(classes, 3, size, size, generator=generator)
    labels = torch.arange(examples + examples // 4) % classes
    images = torch.randn(len(labels), 3, size, size, generator=generator)
    images.add_(centres[labels])
    train, test = slice(examples), slice(examples, None)
    return (
        InMemory(images[train], labels[train]),
        InMemory(images[test], labels[test]),
        classes,
    )


def imagenet(root: Path | None, size: int, seed: int) -> tuple[Dataset, Dataset, int]:
    """Return the training and validation folders under `root`, and the number of classes.

    Raises:
        FileNotFoundError: `root` or one of the folders is missing or empty.
        ValueError: the two folders hold different classes.
    """
    if root is None:
        raise FileNotFoundError("--data imagenet: expected --data-path, but got none")
    train = ImageFolder(root / "train", size, True, seed)
    names = [name for name in VALIDATION_FOLDERS if (root / name).is_dir()]
    if not names:
        raise FileNotFoundError(
            f"{root}: expected a folder {' or '.join(VALIDATION_FOLDERS)}, but got none"
        )
    test = ImageFolder(root / names[0], size, False, seed)
    if train.classes != test.classes:
        different = set(train.classes) ^ set(test.classes)
        raise ValueError(
            f"{root}: expected the same classes in train and {names[0]}, but got "
            f"{sorted(different)[:5]} in only one of them"
        )
    return train, test, len(train.classes)


class RankSampler(Sampler):
    """This rank's (epoch, index) keys of one epoch, from `first_step` on.

    Args:
        examples: number of examples.
        rank: this rank.
        size: number of ranks.
        batch: examples per rank and step.
        steps: steps in an epoch; what is left over comes in other epochs.
        seed: of the order, which is another one in each epoch.
    """

    def __init__(
        self, examples: int, rank: int, size: int, batch: int, steps: int, seed: int
    ):
        self._examples, self._seed = examples, seed
        self._rank, self._size, self._batch, self._steps = rank, size, batch, steps
        self.epoch, self.first_step = 0, 0

    def __len__(self) -> int:
        return (self._steps - self.first_step) * self._batch

    def __iter__(self) -> Iterator[Key]:
        order = np.random.default_rng([self._seed, self.epoch]).permutation(
            self._examples
        )
        for step in range(self.first_step, self._steps):
            start = (step * self._size + self._rank) * self._batch
            for index in order[start : start + self._batch]:
                yield self.epoch, int(index)


class EvaluationSampler(Sampler):
    """Every `size`-th example from `rank` on, so that each counts once over all ranks."""

    def __init__(self, examples: int, rank: int, size: int):
        self._indices = range(rank, examples, size)

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Key]:
        return ((0, index) for index in self._indices)


def loader(dataset: Dataset, sampler: Sampler, batch: int, workers: int) -> DataLoader:
    """Return batches of (images, labels); `workers` processes read ahead."""
    options: dict[str, Any] = {}
    if workers:
        # Forked workers would inherit Horovod's threads and sockets.
        options = {"multiprocessing_context": "forkserver", "persistent_workers": True}
    return DataLoader(
        dataset,
        batch,
        sampler=sampler,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        **options,
    )
