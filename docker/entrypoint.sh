#!/bin/sh
# entrypoint sshd        serve ssh to the other hosts of the job; makes the job's keys if there are none
# entrypoint COMMAND...  run COMMAND, as in any image
set -eu

# One host makes the keys, the others wait for the lock. `authorized_keys` is written last.
make_keys() (
  umask 077
  cd /keys
  flock 9
  [ -s authorized_keys ] && return
  rm -f id_ed25519* host_ed25519*
  ssh-keygen -q -t ed25519 -N '' -C adasum_hvd -f id_ed25519
  ssh-keygen -q -t ed25519 -N '' -C adasum_hvd -f host_ed25519
  printf '[*]:2222 %s\n' "$(cut -d' ' -f1,2 host_ed25519.pub)" > known_hosts
  cp id_ed25519.pub authorized_keys
) 9> /keys/lock

if [ "$*" = sshd ]; then
  if [ ! -s /keys/authorized_keys ]; then make_keys; fi
  exec /usr/sbin/sshd -D -e
fi
exec "$@"
