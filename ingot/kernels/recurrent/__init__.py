"""Recurrent mixers for GPUs: gated delta nets, Mamba 2 and short convolutions, over rows of any number of tokens."""
