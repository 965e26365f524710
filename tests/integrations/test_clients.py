"""The files of examples/clusters, read by the clients that send them."""

from __future__ import annotations

import subprocess

import pytest
import yaml

from tests.parallel.harness.launch import REPOSITORY

CLUSTERS = REPOSITORY / "examples" / "clusters"


def test_kubeflow() -> None:
    """By the models of Trainer's API, which leave out fields that it has not."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    job = yaml.safe_load((CLUSTERS / "kubeflow.yaml").read_text())
    read = models.TrainerV1alpha1TrainJob.from_dict(job)
    assert read.to_dict() == job
    assert (read.spec.trainer.num_nodes, read.spec.trainer.num_proc_per_node) == (2, 2)
    assert (REPOSITORY / read.spec.trainer.command[-1]).exists()


def test_skypilot(tmp_path) -> None:
    """And its command starts torchrun on each node with the ranks' addresses."""
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml(str(CLUSTERS / "skypilot.yaml"))
    assert task.num_nodes == 2 and task.workdir
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\necho "$@"\n')
    torchrun.chmod(0o755)
    node = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    node |= {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "PATH": f"{tmp_path}:/usr/bin:/bin",
    }
    done = subprocess.run(
        ["bash", "-c", task.run], env=node, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [
        *("--nnodes", "2", "--nproc-per-node", "2", "--node-rank", "1"),
        *("--master-addr", "10.0.0.1", "--master-port", "29500"),
        "examples/torch_ddp.py",
    ]
