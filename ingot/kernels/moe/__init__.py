"""Mixtures of experts (MoE): which experts a router chooses, and the weighted sum of what they give."""
