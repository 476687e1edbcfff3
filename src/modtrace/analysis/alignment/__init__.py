"""Which calls, ops and measured tensors of one recording are those of another."""
