"""An open-loop load on any server of OpenAI's API, at several rates, and on several servers in alternation.

    python -m benchmarks.serve --rates 0.5,1,2 --goodput ttft:2000 tpot:100 --plots benchmarks/results
    python -m benchmarks.serve --endpoint ours=URL --endpoint vllm=URL --trace FILE --trace-speed 1,2 --length-scale 0.1
    python -m benchmarks.serve --ours='--dtype bfloat16' --peer-python PATH --peer-model FOLDER --rates 0.5,1

A peer is measured by the very same client: that of `tandem bench`, which does one load on one server. Here every load
(`loads.py`: Poisson arrivals, or a trace's timestamps) goes to each server in turn, and again in each round; equal
rounds are equal requests at equal times. No two rounds share a prompt, so that a prefix cache holds nothing of them but
what a load itself repeats.

Shown are medians of the rounds, for two or more servers their ratios, and the highest of the rates at which 90 % of the
requests kept their objectives (DistServe's goodput).
"""
