"""Does AdaSum train better than an average or a sum? Studies, and what `adasum_lr` answers from."""
