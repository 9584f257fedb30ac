"""A small vision-language model: pictures, questions about them, and the network that learns to answer."""
