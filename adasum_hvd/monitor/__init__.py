"""Records of AdaSum in a run, by tensor, without a framework: docs/monitor.md."""
