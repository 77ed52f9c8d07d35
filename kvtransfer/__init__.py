"""KV blocks between pools: the life of a hand-off.

A *holder* has or computes the blocks of a prompt; a *consumer* has reserved blocks in its own pool and copies them in.
One stream joins them, opened by the consumer, and it is the lease: its end, on either side, frees everything.

1. The consumer's engine reserves blocks for prompt and growth. Its `Consumer` is RESERVED.
2. It opens the stream (OPEN). The `Holder` queues the prefill, or pins a cached prefix (QUEUED), and answers
   `Accepted`: how its pool is mapped, and how long it will wait for the consumer (RECEIVING).
3. As chunks of the prompt are computed, the engine pins their blocks and the holder announces them by `Ready`
   (COMPUTING). The consumer copies them, pool to pool, and answers `Pulled`. Copying overlaps computing.
4. `Pulled` finds the pins alive: the holder says `Confirmed` and drops them. Only now are the copied blocks real, and
   enter the consumer's prefix cache. A copy whose holder let go meanwhile has read garbage, and is never confirmed.
5. With the last chunk comes `Complete`, with the first token, which goes to the client at once (HOLDING).
6. When all is announced and confirmed, the holder is DONE, the consumer COMMITTED: the request decodes.

Any other end (abort, lost stream, expired lease, deadline) is an event like the rest, in any order, any number of
times. The one thing that it cannot do is to free target blocks under a copy: ABORTING waits for that.

Files: `messages` (what is said), `events` (what can happen, and be done), `holder` and `consumer` (both ends, as pure
state machines), `ports` (what they need of a worker), `driver` (a machine on the event loop), `provider` and `puller`
(a worker as holder, and as consumer), `service` and `client` (the stream over gRPC, with `wire` and `channels`),
`loopback` (the stream, and a pool, in one process), `memfd` (a pool that other processes can map), `mapping` (peers'
pools), `copier` (the copies), `counters`, `errors`. On GPUs: `cuda_ipc` (a pool that other processes can map, with
`cuda_handle`, `cuda_peer` and `cuda_fences`), `cuda_copies` (with `cuda_stream`, and `block_copy`, the kernel), and
`staging` (hand-offs through host memory where a pool cannot be mapped, with `staging_area` and `unmappable`).
"""
