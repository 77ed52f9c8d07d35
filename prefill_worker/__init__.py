"""An engine that computes prompts for decode workers, and lends what it caches.

The life of a prefill here (`prefills.py`), asked for by a decode worker's hand-off:

1. **Queued** in the engine, unless the request makes no sense here: then it is refused at once.
2. **Receiving**, if the plan names a third worker that caches a longer prefix: that prefix is pulled first.
3. **Computing** in chunks. Blocks are pinned as they fill and announced to the consumer, which copies them meanwhile.
4. **Holding** after the first token is sampled: pins go as the consumer's copies are confirmed.
5. **Over**: all confirmed, or the stream ended, the lease or deadline passed, the engine failed. Pins go, computing
   stops.

The blocks stay in the prefix cache until they are evicted. For a prompt of several choices a first token is sampled for
each, from the one computation, and all leave together; so do log-probabilities of the prompt, if they are wanted.
"""

from prefill_worker.worker import PrefillWorker

__all__ = ["PrefillWorker"]
