"""Which KV is in which block: the bookkeeping of one worker's pool, without the bytes.

The life of a block. It starts *free*: in the free queue, without content. A request takes it (*active*: somebody holds
a reference), its slots are filled, and when all are, it is registered under its chained hash. From then on other
requests, and hand-offs to peers, may hold it too, and nobody writes into it again. (A block that is not full yet has
several holders only while continuations of one prompt share it: who writes first writes into a copy.) When the last
holder lets go it goes back to the free queue but keeps its hash (*cached*): a later request with the same prefix takes
it out again; if nobody comes, it is evicted when it has become the least recently used, and is free once more.

`block_hash` names content, `block_pool` knows the states above, `manager` keeps requests' block tables and pins,
`slots` is the arithmetic from positions to memory. Neither torch nor numpy is needed here.
"""
