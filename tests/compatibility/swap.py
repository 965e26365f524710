"""`import horovod.torch` that gives `adasum_hvd.torch`, for programs that stay as they are."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable

# What a user's import line changes to. Horovod has two doors to Keras, here there is one.
OURS = {
    "horovod.torch": "adasum_hvd.torch",
    "horovod.tensorflow": "adasum_hvd.tensorflow",
    "horovod.tensorflow.keras": "adasum_hvd.tensorflow.keras",
    "horovod.keras": "adasum_hvd.tensorflow.keras",
}


def swap(names: Iterable[str]) -> None:
    """Put our modules where `import` looks for Horovod's.

    Ours import Horovod's first; modules below (`horovod.torch.mpi_ops`) stay Horovod's.

    Args:
        names: keys of `OURS`.

    Raises:
        KeyError: a name that we have nothing for.
    """
    ours = {name: importlib.import_module(OURS[name]) for name in names}
    for name, module in ours.items():
        parent, _, child = name.rpartition(".")
        setattr(importlib.import_module(parent), child, module)
        sys.modules[name] = module
