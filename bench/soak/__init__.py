"""A server under load: all kinds of requests, clients that disconnect, keys that change, and what is left afterwards.

python -m bench.soak --minutes 30
python -m bench.soak --minutes 2 --model foundry/models/hybrid --flags "--cache-codec affine8"
"""
