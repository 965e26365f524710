"""Time of a TensorFlow training step: Keras `fit` and a loop of one's own, with each reduction.

    python benchmarks/tensorflow_step.py             # 2 and 4 ranks
    python benchmarks/tensorflow_step.py --ranks 2 --launcher mpi

The model is the perceptron of 25 M parameters of `ddp.py`, with momentum SGD. `fit` runs with a
plain optimizer and with ours (op=Average is Horovod's op: its own Keras optimizer reduces nothing
under Keras 3). The loop is a `tf.function` with a tape: Horovod's `DistributedGradientTape`, and
ours. The contenders of a row are interleaved in one process, with a batch of its own on each rank.
The figures are medians of the slowest rank, after a warm-up; losing rows have two stars.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs

WIDTH, LAYERS, BATCH, STEPS = 2048, 6, 8, 12
FIT_ALONE, FIT_AVERAGE = "fit, no reduction", "fit, op=Average"
FIT_GRADIENT, FIT_DELTA = "fit, AdasumGrad", "fit, AdasumDelta"
LOOP_ALONE, LOOP_HOROVOD = "loop, no reduction", "loop, Horovod's tape"
LOOP_ADASUM = "loop, our tape, Adasum"
PEERS = {
    FIT_ALONE: FIT_AVERAGE, FIT_AVERAGE: FIT_AVERAGE, FIT_GRADIENT: FIT_AVERAGE,
    FIT_DELTA: FIT_AVERAGE, LOOP_ALONE: LOOP_HOROVOD, LOOP_HOROVOD: LOOP_HOROVOD,
    LOOP_ADASUM: LOOP_HOROVOD,
}  # fmt: skip


def contender(name: str, rank: int) -> Callable[[], object]:
    """Return a function that takes `STEPS` steps of one contender."""
    import horovod.tensorflow as horovod
    import keras
    import tensorflow as tf

    import adasum_hvd.tensorflow.keras as hvd
    from adasum_hvd.tensorflow import DistributedGradientTape

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(WIDTH) for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    keras.utils.set_random_seed(rank)
    x = tf.random.normal((BATCH * STEPS, WIDTH))
    optimizer: Any = keras.optimizers.SGD(1e-4, momentum=0.9)
    if name.startswith("fit"):
        ops = {
            FIT_AVERAGE: hvd.Average, FIT_GRADIENT: hvd.AdasumGrad, FIT_DELTA: hvd.AdasumDelta,
        }  # fmt: skip
        if name in ops:
            optimizer = hvd.DistributedOptimizer(optimizer, op=ops[name])
        model.compile(optimizer, "mse")
        return lambda: model.fit(x, x, BATCH, epochs=1, shuffle=False, verbose=0)

    optimizer.build(model.trainable_variables)

    @tf.function
    def step(batch: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(batch) - batch) ** 2)
        if name == LOOP_HOROVOD:
            tape = horovod.DistributedGradientTape(tape)
        elif name == LOOP_ADASUM:
            tape = DistributedGradientTape(tape, op=hvd.Adasum)
        weights = model.trainable_variables
        # Horovod's tape knows TensorFlow's variables, and not Keras's.
        gradients = tape.gradient(loss, [weight.value for weight in weights])
        optimizer.apply(gradients, weights)

    def steps() -> None:
        for number in range(STEPS):
            step(x[number * BATCH : (number + 1) * BATCH])

    return steps


def rank_main(repetitions: int, output: Path) -> None:
    """Measure the contenders on this rank; rank 0 writes the slowest rank's times."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    import adasum_hvd.tensorflow.keras as hvd

    hvd.init()
    runs = {name: contender(name, hvd.rank()) for name in PEERS}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(-2, repetitions):
        for name, steps in runs.items():
            hvd.allreduce(tf.zeros(1), name=f"start.{name}")
            started = time.perf_counter()
            steps()
            if repetition >= 0:
                times[name].append((time.perf_counter() - started) / STEPS)
    everyone = hvd.allgather_object(times)
    if hvd.rank() == 0:
        output.write_text(json.dumps(jobs.slowest(everyone)))
    hvd.shutdown()


def show(ranks: int, times: dict[str, list[float]]) -> None:
    """Print a line for every contender."""
    medians = {name: statistics.median(of) for name, of in times.items()}
    for name, median in medians.items():
        ratio = jobs.ratio(median / medians[PEERS[name]])
        print(f"{ranks:5d} {name:24s} {median * 1e3:8.1f}  {ratio}")


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["--rank"]:
        _, _, repetitions, output = sys.argv
        rank_main(int(repetitions), Path(output))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--launcher", default="gloo", choices=["exec", "gloo", "mpi"])
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--output", type=Path, default=Path("build/tensorflow.json"))
    arguments = parser.parse_args()
    rows = []
    print(f"ranks {'step of':24s} {'ms':>8s}  / op=Average, or Horovod's tape")
    for ranks in arguments.ranks:
        times = jobs.run(arguments.launcher, ranks, __file__, arguments.repetitions)
        rows.append({"ranks": ranks, "launcher": arguments.launcher, "times": times})
        show(ranks, times)
    jobs.save(rows, arguments.output)


if __name__ == "__main__":
    main()
