"""Sampling: the life of a row of logits.

The model leaves one row of logits for each request that samples. If the client asked, log-probabilities are taken from
it as it is (`logprobs.py`). Then what the request's structure does not allow is made impossible (`allowed.py`), which
nothing after it can undo, and the rest is bent by what the request has said and been told so far: masked stop tokens,
biases, penalties (`penalties.py`). A greedy request takes its best token. Any other takes the token at one uniform
number (`uniform.py`, a function of seed and position) of the distribution that temperature, min-p, top-k and top-p
leave (`distribution.py`).

A row is handled alone, by operations on that row alone: nothing in the same batch can change a bit of its result.
"""
