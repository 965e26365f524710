#!/usr/bin/env bash
# Executes docker/Dockerfile.cpu for real, without a docker daemon, then runs docker-compose.yml's job in the
# image: one chroot, network namespace, host name and ssh server per service. Needs root, debootstrap, buildah
# and 20 GB; takes 18 minutes on 2 cores, of which Horovod 8.
#
#   sudo docker/check.sh         build, run, remove everything
#   sudo docker/check.sh --keep  leave debootstrap's root, the Horovod wheel and the image; the next call takes them up
#   sudo docker/check.sh --run   only run, in the image that --keep left
#
# WORK        where the folder adasum-docker is made, default: /var/tmp
# VOLUMES     folders of this machine that pip's configuration points to, e.g. "/srv/wheels"
# COMMAND     what the job runs, default: the command of docker-compose.yml
set -euo pipefail
cd "$(dirname "$0")/.."

for tool in debootstrap buildah ip unshare; do
  command -v "$tool" > /dev/null || { echo "check.sh: required $tool; apt-get install debootstrap buildah iproute2 util-linux" >&2; exit 1; }
done
[ "$(id -u)" = 0 ] || { echo "check.sh: required root (debootstrap, network namespaces); run it with sudo" >&2; exit 1; }

case ${1:-} in
  "" | --keep | --run) mode=${1:-} ;;
  *) echo "check.sh: required --keep, --run or nothing, got $1" >&2; exit 2 ;;
esac
work=$(realpath "${WORK:-/var/tmp}")/adasum-docker
export TMPDIR=$work/tmp # for buildah's caches
mkdir -p "$TMPDIR"
exec 9> "$work/lock"
flock --nonblock 9 || { echo "check.sh: another one runs in $work; wait for its end" >&2; exit 1; }
base=localhost/adasum-hvd-base image=localhost/adasum-hvd:cpu
bridge=adasum0 subnet=10.213.77
store=(--root "$work/storage" --runroot "$work/run" --storage-driver vfs)
services=() mounted=""

say() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }

cleanup() {
  local pids service
  for service in "${services[@]}"; do
    pids=$(ip netns pids "adasum-$service" 2> /dev/null || true)
    # shellcheck disable=SC2086 # one word per process
    [ -z "$pids" ] || kill -KILL $pids 2> /dev/null || true
    ip netns delete "adasum-$service" 2> /dev/null || true
    umount --lazy "$work/$service/root" 2> /dev/null || true
  done
  [ "${#services[@]}" = 0 ] || ip link delete "$bridge" 2> /dev/null || true
  [ -z "$mounted" ] || buildah "${store[@]}" rm "$mounted" > /dev/null || true
  if [ -n "$mode" ]; then echo "kept: $work"; else rm -rf --one-file-system "$work"; fi
}
trap cleanup EXIT

# An image as bare as Debian's own: nothing of this machine can hide a package that the Dockerfile forgot.
base_image() {
  local container
  buildah "${store[@]}" inspect --type image "$base" > /dev/null 2>&1 && return
  debootstrap --variant=minbase bookworm "$work/bookworm" > "$work/debootstrap.log"
  container=$(buildah "${store[@]}" from scratch)
  buildah "${store[@]}" add --quiet "$container" "$work/bookworm" / > /dev/null
  buildah "${store[@]}" commit --quiet --rm "$container" "$base" > /dev/null
  rm -rf "$work/bookworm"
}

# pip inside sees this machine's pip configuration and certificates, and nothing else of it. The certificates lie
# where no package has files: Debian's ca-certificates replaces its own while it is installed.
pip_volumes() {
  local path certificates=/etc/ssl/certs/ca-certificates.crt
  {
    echo "[global]"
    { python3 -m pip config list 2> /dev/null || true; } | sed -nE "/^global\.cert=/d; s/^global\.([a-z-]+)='(.*)'\$/\1 = \2/p"
    [ ! -e $certificates ] || echo "cert = /run/host-certificates.crt"
  } > "$work/pip.conf"
  printf -- '--volume=%s:%s:ro\n' "$work/pip.conf" /etc/pip.conf
  [ ! -e $certificates ] || printf -- '--volume=%s:%s:ro\n' $certificates /run/host-certificates.crt
  for path in ${VOLUMES:-}; do printf -- '--volume=%s:%s:ro\n' "$path" "$path"; done
}

build_image() {
  local volumes
  mapfile -t volumes < <(pip_volumes)
  buildah "${store[@]}" bud --isolation chroot --network host "${volumes[@]}" \
    --build-arg "BASE=$base" --build-arg "PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL:-}" \
    --file docker/Dockerfile.cpu --tag "$image" .
}

# Runs a command as the image's user in the service's own root, network, host name and processes.
inside() {
  local service=$1 root=$work/$1/root
  shift
  # shellcheck disable=SC2016 # the inner shell expands
  ip netns exec "adasum-$service" unshare --mount --uts --pid --fork --kill-child bash -euc '
    hostname "$1"
    root=$2
    shift 2
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs -o size=1g,mode=1777 tmpfs "$root/dev/shm"
    exec chroot --userspec=10001:10001 "$root" env --ignore-environment "${@}"
  ' bash "$service" "$root" HOME=/home/horovod "${environment[@]}" \
    sh -c 'cd ~ && exec entrypoint "$@"' sh "$@"
}

start_network() {
  local service number=0
  ip link add "$bridge" type bridge
  ip link set "$bridge" up
  for service in "${services[@]}" keys; do rm -rf --one-file-system "${work:?}/$service"; done
  mkdir -p "$work/keys"
  chown 10001:10001 "$work/keys"
  echo "127.0.0.1 localhost" > "$work/hosts"
  for service in "${services[@]}"; do
    number=$((number + 1))
    echo "$subnet.$number $service" >> "$work/hosts"
    ip netns add "adasum-$service"
    ip link add "adasum$number" type veth peer name eth0 netns "adasum-$service"
    ip link set "adasum$number" master "$bridge" up
    ip -n "adasum-$service" address add "$subnet.$number/24" dev eth0
    ip -n "adasum-$service" link set eth0 up
    ip -n "adasum-$service" link set lo up
    mkdir -p "$work/$service/root" "$work/$service/upper" "$work/$service/overlay"
    mount -t overlay overlay "$work/$service/root" \
      -o "lowerdir=$rootfs,upperdir=$work/$service/upper,workdir=$work/$service/overlay"
    mount --bind "$work/keys" "$work/$service/root/keys"
  done
  for service in "${services[@]}"; do cp "$work/hosts" "$work/$service/root/etc/hosts"; done
}

if [ "$mode" != --run ]; then
  say "bookworm from debootstrap"
  base_image
  say "docker/Dockerfile.cpu; the step that builds Horovod reports every 30 seconds"
  build_image
fi

mounted=$(buildah "${store[@]}" from "$image")
rootfs=$(buildah "${store[@]}" mount "$mounted")
mapfile -t environment < <(buildah "${store[@]}" inspect --type image --format '{{range .OCIv1.Config.Env}}{{println .}}{{end}}' "$image" | sed '/^$/d')
# Host names and commands are those of docker-compose.yml, one line per service, read by the image's own Python.
mapfile -t lines < <(chroot "$rootfs" /opt/venv/bin/python -c '
import shlex, sys, yaml
for name, service in yaml.safe_load(sys.stdin)["services"].items():
    print(service["hostname"], shlex.join(service["command"]))
' < docker/docker-compose.yml)
services=("${lines[@]%% *}")

say "image: $(du -sh "$rootfs" | cut -f1), of which /opt/venv $(du -sh "$rootfs/opt/venv" | cut -f1)"
start_network
for line in "${lines[@]}"; do
  service=${line%% *} command=${line#* }
  if [ "$command" = sshd ]; then
    inside "$service" sshd > "$work/$service/log" 2>&1 &
    until inside "$service" ssh localhost true 2> /dev/null; do
      [ "$SECONDS" -lt "${limit:=$((SECONDS + 60))}" ] || { echo "check.sh: no ssh server in $service:" >&2; cat "$work/$service/log" >&2; exit 1; }
      sleep 1
    done
  else
    command=${COMMAND:-$command}
    say "$service: $command"
    eval "inside $service $command"
  fi
done
say "docker/Dockerfile.cpu and docker-compose.yml's job: both ran"
