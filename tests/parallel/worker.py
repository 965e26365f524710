"""What each rank runs: every `case_*` function of one file, in order, all ranks together."""

from __future__ import annotations

import faulthandler
import importlib
import json
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
faulthandler.dump_traceback_later(200, exit=True)  # shows where a stuck rank stands


def main() -> None:
    """Run `worker.py CASES DIRECTORY`."""
    module = importlib.import_module(sys.argv[1])
    hvd = module.hvd
    module.start()
    report = Path(sys.argv[2], f"rank-{hvd.rank()}.jsonl")
    cases = [name for name in vars(module) if name.startswith("case_")]
    for name in cases:
        error, result = "", None
        try:
            result = getattr(module, name)()
        except Exception:
            error = traceback.format_exc()
        with report.open("a") as file:
            file.write(
                json.dumps({"case": name, "error": error, "result": result}) + "\n"
            )
        module.align()
    hvd.shutdown()


if __name__ == "__main__":
    main()
