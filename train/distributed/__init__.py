"""Several processes: data parallel, sharded, and with DeepSpeed."""
