"""Hours of a server's life in minutes: all kinds of requests, clients that leave, keys that change, and what is left.

python -m bench.soak --minutes 30
python -m bench.soak --minutes 2 --model foundry/models/hybrid --flags "--cache-codec affine8"
"""
