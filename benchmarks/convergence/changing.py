"""Study 8: workers come and go within one run, and the rate stays."""

from __future__ import annotations

import time
from typing import Any

from convergence.target import is_finite, non_defaults, version
from convergence.training import Job, Setting

_SCALES = {
    "": 0.0,
    "linear": 1.0,
    "root": 0.5,
}  # the power of N that multiplies the rate


def train_changing(setting: Setting) -> dict[str, Any]:
    """Return the record of a run: `levels` at the end of each phase, and `steps` of each.

    The rate is that of the setting after a warm-up over `warm_up` of all examples (AdaScale: as
    `Job.warm_up`), times the number of workers (`scaling` "linear") or its root ("root"). The
    optimizer's state stays.
    """
    began = time.process_time()
    counts = [int(each) for each in setting.phases.split("-")]
    job = Job(setting)
    batch = setting.batch or job.work.batch
    record: dict[str, Any] = {**non_defaults(setting), "levels": [], "steps": []}
    for phase, workers in enumerate(counts):
        steps = job.work.steps(setting.budget, batch, workers * len(counts))
        draws = job.work.draws(1000 * setting.seed + phase, workers, batch)
        factor = workers ** _SCALES[setting.scaling]
        for step in range(1, steps + 1):
            done = (phase + step / steps) / len(counts)
            warm = min(1.0, done / setting.warm_up)
            if setting.op == "adascale":
                warm = job.warm_up()
            job.step(next(draws), setting.lr * factor * warm, look=False)
        level = job.work.level(job.model)
        record["steps"].append(steps)
        if not is_finite(job, level):
            record["diverged"] = sum(record["steps"])
            break
        record["levels"].append(round(level, 5))
    record["seconds"] = round(time.process_time() - began, 2)
    return record | {"code": version()}
