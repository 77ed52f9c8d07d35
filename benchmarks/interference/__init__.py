"""What long prompts do to the streams that are running: prefill apart, colocated, and a peer's, on the same two cores.

    python -m benchmarks.interference [--peer-python PATH --peer-model FOLDER [--preload LIBRARY]] [--plots FOLDER]

A run: the prefill capacity of one core is measured, and half of it is the rate at which prompts will arrive. Then, in
each round, every arrangement is started in turn: one prefill and one decode worker with a core each, one worker of ours
that does both on two cores, and the peer's server on two cores. Each gets the same load (`load.py`): streams that
decode all the time, and prompts of 1,000 tokens that arrive while they do, at the same moments for all.

Client and gateway, or the peer's front end, run on the same two cores as what they wait for: so it is for all.
"""
