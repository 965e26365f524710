#!/usr/bin/env bash
# torch 2.13.0, Gloo: `Work.wait(timeout)` of one receive that times out closes all connections of
# this rank in the process group. Nothing else of the group works there afterwards, and the other
# ranks are told that this one has crashed, although it runs.
#
# Expected: the message stays pending, as a wait with a timeout suggests: a rank may look for a
# message now and then and go on. Only that wait raises.
# Seen (2026-11-28), ranks 0 to 2; rank 0 waits 50 ms for a message that rank 1 never sends, then
# all ranks call all_reduce, and ranks 1 and 2 exchange a message:
#     rank 0: wait: Timed out waiting 50ms for recv operation to complete
#     rank 0: all_reduce: Application timeout caused pair closure
#     rank 1: all_reduce: Connection closed by peer
#     rank 1: sent
#     rank 2: all_reduce: Connection closed by peer
#     rank 2: received
#
# Fails if this behaviour changes. Needs Python 3.10 or later and a package index; no device.
set -euo pipefail
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install --quiet torch==2.13.0 numpy
cat > program.py <<'PYTHON'
import re
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

WORDS = r"Timed out waiting \w+ for recv operation to complete|Application timeout caused pair closure|Connection closed by peer"
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=3)
dist.barrier()


def show(what, call):
    try:
        call()
        print(f"rank {rank}: {what}", flush=True)
    except RuntimeError as error:
        print(f"rank {rank}: {what}: {re.search(WORDS, str(error))[0]}", flush=True)


if rank == 0:
    show("wait", lambda: dist.irecv(torch.zeros(1), 1).wait(timedelta(milliseconds=50)))
else:
    time.sleep(2)
show("all_reduce", lambda: dist.all_reduce(torch.ones(1)))
if rank == 1:
    show("sent", lambda: dist.send(torch.ones(1), 2))
if rank == 2:
    show("received", lambda: dist.recv(torch.ones(1), 1))
time.sleep(3)  # rank 0 runs on
PYTHON
for rank in 0 1 2; do
  environment/bin/python program.py "$rank" "$folder/store" > "found.$rank" 2> "log.$rank" &
done
wait
cat found.? | tee found
diff found - << 'SEEN' || { cat log.?; exit 1; }
rank 0: wait: Timed out waiting 50ms for recv operation to complete
rank 0: all_reduce: Application timeout caused pair closure
rank 1: all_reduce: Connection closed by peer
rank 1: sent
rank 2: all_reduce: Connection closed by peer
rank 2: received
SEEN
