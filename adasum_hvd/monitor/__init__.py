"""Records of AdaSum in a run, by tensor, without a framework: docs/monitor.md.

`monitor` requests records from the op, `statistics` computes their numbers, and `sinks` writes
them. Each framework's `AdasumMonitor` provides the tensors.
"""
