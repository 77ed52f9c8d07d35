"""The Triton kernels: keys and values are written, then looked at.

`write` puts a step's keys and values into their slots. `prefill` attends the queries of chunks, `decode` single
queries, in splits that it combines. Both are loops of one step, in `tile`: some queries by some keys, found through the
block table.

Modules in here import triton, which decides at that moment whether kernels are compiled or interpreted. So they are
imported only by the backend that launches them, when it is made. They know no step and no model: pointers, numbers, and
constants that decide what is compiled.
"""
