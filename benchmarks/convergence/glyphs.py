"""65 000 images of 62 letters and digits, from the fonts that matplotlib ships, and a ResNet.

Each image is one of 20 fonts' glyphs under a random affine map, with noise; a seed makes all of
them, offline. Fonts are not split: training and test have the same fonts, and no image in common.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from convergence.images import Images

CLASSES = string.digits + string.ascii_uppercase + string.ascii_lowercase
FONTS = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *("cmr10", "cmss10", "cmtt10", "cmb10"),
)
SIZE, MASTER = 16, 48  # pixels: of an image, and of the glyph that it is cut from
IMAGES = {"train": 50_000, "validation": 5_000, "test": 10_000}
NOISE, SHIFT = 0.15, 1  # standard deviation, and pixels of augmentation


def master(font: str, glyph: str) -> np.ndarray:
    """Return a glyph, float32 (MASTER, MASTER) from 0 to 1, centred, without its size on a line."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    path = Path(matplotlib.get_data_path()) / "fonts/ttf" / f"{font}.ttf"
    drawn = ImageFont.truetype(str(path), 3 * MASTER // 4)
    image = Image.new("L", (MASTER, MASTER))
    middle = (MASTER // 2, MASTER // 2)
    ImageDraw.Draw(image).text(middle, glyph, fill=255, font=drawn, anchor="mm")
    return np.asarray(image, np.float32) / 255


@functools.cache
def masters() -> torch.Tensor:
    """Return every glyph of every font, (fonts, classes, MASTER, MASTER)."""
    return torch.from_numpy(np.stack([[master(f, c) for c in CLASSES] for f in FONTS]))


def maps(count: int, generator: torch.Generator) -> torch.Tensor:
    """Return random affine maps (count, 2, 3): turn, size, shear and shift."""
    low_high = ((-0.25, 0.25), (0.8, 1.25), (0.8, 1.25), (-0.2, 0.2), (-0.2, 0.2))
    drawn = torch.rand(6, count, generator=generator)
    bounds = (*low_high, (-0.2, 0.2))
    angle, wide, high, shear, x, y = (
        low + (top - low) * each for (low, top), each in zip(bounds, drawn, strict=True)
    )
    cos, sin = angle.cos(), angle.sin()
    rows = (wide * cos, shear - sin, x, wide * sin, high * cos, y)
    return torch.stack(rows, 1).view(count, 2, 3)


@functools.cache
def images(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a split's images (count, 1, SIZE, SIZE), paper 0 and ink 1, and labels."""
    count = IMAGES[split]
    generator = torch.Generator().manual_seed(list(IMAGES).index(split))
    fonts = torch.randint(len(FONTS), (count,), generator=generator)
    labels = torch.randint(len(CLASSES), (count,), generator=generator)
    affine = maps(count, generator)
    parts = []
    for rows in torch.arange(count).split(5000):
        glyphs = masters()[fonts[rows], labels[rows]][:, None]
        shape = [len(rows), 1, SIZE, SIZE]
        grid = functional.affine_grid(affine[rows], shape, align_corners=False)
        # The mean over 3 x 3 pixels, so that thin strokes are not lost between samples.
        soft = functional.avg_pool2d(glyphs, 3, 1, 1)
        cut = functional.grid_sample(soft, grid, align_corners=False)
        noise = torch.randn(shape, generator=generator)
        parts.append(cut + NOISE * noise)
    return torch.cat(parts), labels


class ResNet8(nn.Module):
    """Eight layers (He et al. 2016): a convolution, three blocks of two, and a linear one.

    Group norm stands for batch norm, because a worker's batch is small. The linear layer has all
    pixels of the last block and not their mean, with which training takes many times as long.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width)
        self.first = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(4, width)
        pairs = zip((width, *widths), widths, strict=False)
        self.blocks = nn.ModuleList(Block(*pair) for pair in pairs)
        self.last = nn.Linear(widths[-1] * (SIZE // 4) ** 2, len(CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, 62) for images (batch, 1, SIZE, SIZE)."""
        x = functional.relu(self.norm(self.first(x)))
        for block in self.blocks:
            x = block(x)
        return self.last(x.flatten(1))


class Block(nn.Module):
    """Two convolutions; with a new width, half the pixels and a linear shortcut."""

    def __init__(self, narrow: int, wide: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(narrow, wide, 3, 1 + (narrow != wide), 1, bias=False)
        self.two = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.norm_one, self.norm_two = nn.GroupNorm(4, wide), nn.GroupNorm(4, wide)
        self.short = (
            nn.Conv2d(narrow, wide, 1, 2, bias=False) if narrow != wide else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the block's width."""
        short = x if self.short is None else self.short(x)
        x = functional.relu(self.norm_one(self.one(x)))
        return functional.relu(short + self.norm_two(self.two(x)))


class Glyphs(Images):
    """The workload: ResNet8, 4 images per worker and step, moved by up to a pixel."""

    batch = 4

    def __init__(self, name: str, split: str) -> None:
        super().__init__(*images("train"), images(split))

    def model(self) -> nn.Module:
        """As the protocol's."""
        return ResNet8()

    def draws(
        self, seed: int, workers: int, batch: int
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """As the protocol's: images are drawn with replacement, each at its own shift."""
        rng = np.random.default_rng(seed)
        span = 2 * SHIFT + 1
        while True:
            chosen = torch.from_numpy(
                rng.integers(0, len(self._images), workers * batch)
            )
            found = functional.pad(self._images[chosen], [SHIFT] * 4, mode="replicate")
            corners = torch.from_numpy(rng.integers(0, span, (2, workers * batch)))
            rows, columns = corners[:, :, None] + torch.arange(SIZE)
            index = torch.arange(len(chosen))[:, None, None]
            moved = found[index, 0, rows[:, :, None], columns[:, None]]
            shape = (workers, batch, 1, SIZE, SIZE)
            yield moved.view(shape), self._labels[chosen].view(workers, batch)
