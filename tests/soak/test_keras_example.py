"""The elastic example of Keras, whose two ranks take a while to import it."""

from __future__ import annotations

from pathlib import Path

from tests.parallel.harness import elastic_example


def test_keras_elastic(tmp_path: Path) -> None:
    assert elastic_example.run(tmp_path, "keras_elastic.py") > 60
