"""An engine that pulls prompts' KV in, and decodes.

The life of a request here (`requests.py`, `receiver.py`), submitted through a gateway's session:

1. **Waiting** in the engine until the pool can hold its prompt and expected growth. Nobody prefills it before.
2. **Receiving**, if the plan names a prefill worker: its blocks are reserved, a hand-off is opened to that worker,
   blocks are copied as they become ready. The first token goes to the gateway as soon as the prefill has it. A lost
   prefill worker is reported (`NeedPrefill`), and the gateway names another, or none: then the rest is prefilled
   here. Without a prefill worker in the plan it is prefilled here from the start, after pulling the prefix that a
   third worker caches, if the plan names one.
3. **Decoding** in the running batch once every block is confirmed; all tokens of a step for one gateway leave in one
   message.
4. **Over**: finished, refused, aborted, out of time, or its session broken. Whatever comes later is ignored.

A prompt of several choices goes the first two steps once: one request of the engine, one hand-off, which brings all
first tokens. From then on its choices are requests of their own that share its blocks. Each may end alone at any time;
the prompt goes with the last of them.
"""

from decode_worker.worker import DecodeWorker

__all__ = ["DecodeWorker"]
