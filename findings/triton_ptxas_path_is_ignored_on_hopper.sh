#!/usr/bin/env bash
# Triton 3.9.0: the variable TRITON_PTXAS_PATH, which names the ptxas to assemble with, is ignored
# without a word for an H100 or H200 (sm_90), where release 3.7.1 followed it. The variable that
# counts there is TRITON_PTXAS_BLACKWELL_PATH, although the device is no Blackwell. For the same
# reason the PTX that Triton writes for such a device is of version 9.4, which `ptxas` next to it in
# the wheel (CUDA 12.9) refuses; `ptxas-blackwell` (13.4) takes it.
#
# Expected: the variable chooses the assembler of every device, or a word that it does not. Who
# avoids a faulty ptxas by it goes on with the one of the wheel.
# Seen (2026-11-28); a wrapper notes that it was called, and calls the wheel's program:
#     sm_80, TRITON_PTXAS_PATH: called
#     sm_90, TRITON_PTXAS_PATH: not called
#     sm_90, TRITON_PTXAS_BLACKWELL_PATH: called
#     PTX of sm_90: 9.4; ptxas of the wheel: Unsupported .version 9.4; current version is '8.8'
#
# Fails if this behaviour changes. Needs Python 3.10 or later and a package index; no device.
set -euo pipefail
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
environment/bin/pip install --quiet triton==3.9.0
cat > kernel.py <<'PYTHON'
import sys
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def double(x, count, WIDTH: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(x + at, 2 * tl.load(x + at, at < count), at < count)


source = ASTSource(double, {"x": "*fp32", "count": "i32", "WIDTH": "constexpr"}, {"WIDTH": 128})
made = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32))
Path("kernel.ptx").write_text(made.asm["ptx"])
PYTHON
programs=$(echo environment/lib/python3*/site-packages/triton/backends/nvidia/bin)
for name in ptxas ptxas-blackwell; do
  printf '#!/bin/sh\ntouch "%s/called"\nexec "%s/%s/%s" "$@"\n' \
    "$folder" "$folder" "$programs" "$name" > "own-$name"
  chmod +x "own-$name"
done
compile() {  # device, variable, wrapper
  rm -rf called cache
  env TRITON_CACHE_DIR="$folder/cache" "$2=$folder/$3" environment/bin/python -W ignore kernel.py "$1"
  echo "sm_$1, $2: $([ -e called ] && echo called || echo not called)"
}
{
  compile 80 TRITON_PTXAS_PATH own-ptxas
  compile 90 TRITON_PTXAS_PATH own-ptxas
  compile 90 TRITON_PTXAS_BLACKWELL_PATH own-ptxas-blackwell
  version=$(sed -n 's/^\.version //p' kernel.ptx)
  refused=$("$programs/ptxas" -arch=sm_90a kernel.ptx -o kernel.cubin 2>&1 || true)
  echo "PTX of sm_90: $version; ptxas of the wheel: $(grep -o "Unsupported .*" <<< "$refused")"
} | tee found
diff found - << 'SEEN'
sm_80, TRITON_PTXAS_PATH: called
sm_90, TRITON_PTXAS_PATH: not called
sm_90, TRITON_PTXAS_BLACKWELL_PATH: called
PTX of sm_90: 9.4; ptxas of the wheel: Unsupported .version 9.4; current version is '8.8'
SEEN
