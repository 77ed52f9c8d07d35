"""The GPU under an engine: the runtime that it is asked through, its checks, its graphs.

Nothing in here touches CUDA when it is imported: a process that has touched it before Ray told it which GPU is its own
would sit on GPU 0 for ever.
"""
