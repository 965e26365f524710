"""Arguments, agreement between ranks and bindings of the op, without a framework."""
