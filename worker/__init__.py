"""What a prefill and a decode worker share: an engine in its thread, behind gRPC, counted.

The life of a worker:

1. **Build** (`build.py`): the executor is loaded, the block pool is mapped, the engine is put together.
2. **Serve** (`node.py`): a gRPC server answers `Worker`, `KvExchange`, health and reflection on an asyncio loop,
   while one thread (`engine_thread.py`) owns the engine and runs its steps. Whoever wants something of the engine
   posts it to that thread, which takes it up between two steps; what a step brought comes back to the loop.
3. **Drain** (`Worker.Drain`): no new request is taken, those in flight end.
4. **Stop**: what is left is aborted, the pool proves itself whole and is unmapped.

If the engine fails the worker does not live on half dead: every request is told, `wait` raises, the process ends, and
whoever started it starts another.
"""
