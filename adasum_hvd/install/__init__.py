"""Builds Horovod with the AdaSum op, and says what a machine lacks: the command `adasum-hvd`."""
