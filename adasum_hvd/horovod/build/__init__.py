"""Building Horovod with the AdaSum op, and finding the parts that a machine lacks."""
