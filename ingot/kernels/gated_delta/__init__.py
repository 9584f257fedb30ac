"""The gated delta rule for GPUs: states in registers, whatever number of tokens passes over them."""
