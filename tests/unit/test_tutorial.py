"""The tutorial's parts that need no ranks: model, recipe, input pipeline."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
import torch
from PIL import Image
from resnet50 import data, recipe
from resnet50.model import ResNet50


def test_model_is_resnet50():
    model = ResNet50(classes=1000)
    assert (
        sum(p.numel() for p in model.parameters()) == 25_557_032
    )  # the published count
    narrow = ResNet50(classes=10, width=1 / 16)
    assert narrow(torch.zeros(2, 3, 64, 64)).shape == (2, 10)
    assert sum(p.numel() for p in narrow.parameters()) < 200_000


def test_parameter_groups():
    model = ResNet50(classes=10, width=1 / 16)
    decayed, rest = recipe.parameter_groups(model, 1e-4)
    assert decayed["weight_decay"] == 1e-4 and rest["weight_decay"] == 0
    assert all(p.dim() > 1 for p in decayed["params"])
    assert len(decayed["params"]) == 54  # 53 convolutions and the classifier
    assert len(rest["params"]) == 2 * 53 + 1  # scale and shift of each, the bias
    named = {id(p) for p in decayed["params"] + rest["params"]}
    assert named == {id(p) for p in model.parameters()}


def test_learning_rate():
    warmup, total = 5 * 312, 90 * 312  # the tutorial's
    rates = [recipe.learning_rate(s, warmup, total, 0.8, 0.0) for s in range(total)]
    assert rates[0] == 0 and max(rates) == rates[warmup] == 0.8
    steps = np.diff(rates)
    np.testing.assert_allclose(steps[:warmup], 0.8 / warmup)
    np.testing.assert_allclose(steps[warmup:], -0.8 / (total - warmup))
    assert rates[-1] == pytest.approx(0.8 / (total - warmup))
    assert recipe.learning_rate(3, 0, 3, 0.8, 0.1) == pytest.approx(0.1)
    assert doctest.testmod(recipe) == (0, 1)


@pytest.fixture
def folder(tmp_path):
    """An ImageNet folder: 3 classes, images of several sizes and modes."""
    random = np.random.default_rng(0)
    for part in ("train", "validation_preprocess"):
        for label, name in enumerate(("n01", "n02", "n03")):
            (tmp_path / part / name).mkdir(parents=True)
            for index, (height, width) in enumerate([(40, 60), (64, 32), (50, 50)]):
                pixels = (
                    random.integers(0, 60, (height, width, 3), np.uint8) + 60 * label
                )
                image = Image.fromarray(pixels.astype(np.uint8))
                image = image.convert("L") if index == 1 else image
                suffix = ("JPEG", "png", "jpg")[index]
                image.save(tmp_path / part / name / f"{index}.{suffix}")
            (tmp_path / part / name / "notes.txt").write_text("not an image")
    return tmp_path


def test_image_folder(folder):
    train, test, classes = data.imagenet(folder, 32, seed=1)
    assert (len(train), len(test), classes) == (9, 9, 3)
    for dataset in (train, test):
        labels = []
        for index in range(9):
            pixels, label = dataset[(0, index)]
            assert pixels.shape == (3, 32, 32) and pixels.dtype == torch.float32
            # Class k was painted in 60 k to 60 k + 60.
            brightness = (pixels * data.STD + data.MEAN).mean() * 255
            assert 60 * label < brightness < 60 * label + 60
            labels.append(label)
        assert labels == [0] * 3 + [1] * 3 + [2] * 3


def test_what_is_random_depends_on_epoch_and_index(folder):
    train, test, _ = data.imagenet(folder, 32, seed=1)
    again, _, _ = data.imagenet(folder, 32, seed=1)
    other, _, _ = data.imagenet(folder, 32, seed=2)
    first = train[(3, 4)][0]
    assert torch.equal(first, again[(3, 4)][0])
    assert not torch.equal(first, train[(4, 4)][0])
    assert not torch.equal(first, other[(3, 4)][0])
    assert torch.equal(test[(3, 4)][0], test[(4, 4)][0])


def test_central_crop(tmp_path):
    """The crop removes a black border of 1/16 of the image's side."""
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[4:-4, 4:-4] = 255
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / part / "a" / "0.png")
    _, test, _ = data.imagenet(tmp_path, 28, seed=0)
    white = test[(0, 0)][0] * data.STD + data.MEAN
    inside = white[:, 1:-1, 1:-1]  # the filter reaches a pixel beyond the crop
    assert torch.allclose(inside, torch.ones(3, 26, 26), atol=1e-5)


def test_bad_folders(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="expected --data-path"):
        data.imagenet(None, 32, 0)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        data.imagenet(tmp_path / "nowhere", 32, 0)
    (folder / "train" / "n04").mkdir()
    with pytest.raises(ValueError, match=r"the same classes.*'n04'"):
        data.imagenet(folder, 32, 0)
    (folder / "train" / "n04").rmdir()
    (folder / "validation_preprocess").rename(folder / "other")
    with pytest.raises(
        FileNotFoundError, match="expected a folder validation_preprocess or"
    ):
        data.imagenet(folder, 32, 0)
    for path in (folder / "other").glob("*/[0-2].*"):
        path.unlink()
    (folder / "other").rename(folder / "val")
    with pytest.raises(FileNotFoundError, match="got none in 3 folders"):
        data.imagenet(folder, 32, 0)


def test_broken_image(folder):
    (folder / "train" / "n01" / "0.JPEG").write_bytes(b"\xff\xd8broken")
    train, _, _ = data.imagenet(folder, 32, 0)
    with pytest.raises(OSError, match=r"n01/0\.JPEG"):
        train[(0, 0)]


def keys(rank: int, epoch: int = 0, first_step: int = 0) -> list[data.Key]:
    sampler = data.RankSampler(23, rank, size=3, batch=2, steps=3, seed=5)
    sampler.epoch, sampler.first_step = epoch, first_step
    assert len(sampler) == len(list(sampler))
    return list(sampler)


def test_ranks_share_an_epoch():
    everyone = [keys(rank) for rank in range(3)]
    indices = [index for of_rank in everyone for _, index in of_rank]
    assert len(indices) == len(set(indices)) == 18
    assert keys(0) == keys(0) != keys(0, epoch=1)
    assert keys(1, epoch=2, first_step=2) == keys(1, epoch=2)[4:]
    shares = [list(data.EvaluationSampler(8, rank, 3)) for rank in range(3)]
    assert sorted(index for share in shares for _, index in share) == list(range(8))


def test_workers_change_nothing(folder):
    train, _, _ = data.imagenet(folder, 32, seed=1)
    sampler = data.RankSampler(9, rank=0, size=1, batch=3, steps=3, seed=5)
    alone = data.loader(train, sampler, 3, workers=0)
    with_workers = data.loader(train, sampler, 3, workers=2)
    for epoch in (0, 1):
        sampler.epoch = epoch
        for (a, m), (b, n) in zip(alone, with_workers, strict=True):
            assert torch.equal(a, b) and torch.equal(m, n)


def test_small_data():
    train, test, classes = data.digits(32)
    assert (len(train), len(test), classes) == (1437, 360, 10)
    image, label = train[(0, 5)]
    assert image.shape == (3, 32, 32) and 0 <= int(label) < 10
    assert image.min() >= -1 and image.max() <= 1
    train, test, classes = data.synthetic(16)
    assert (len(train), len(test), classes) == (1280, 320, 10)
    assert train[(0, 3)][0].shape == (3, 16, 16)
