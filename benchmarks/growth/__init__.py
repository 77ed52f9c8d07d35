"""Cost as work grows: what should be constant is, and what should grow in proportion grows no faster.

    python -m benchmarks.growth [--sections batch,context,pool,directory] [--json FILE] [--plots FOLDER]

`batch` and `context` run the embedded model, one thread: the time of a decode step against the number of requests in
it, and against the tokens before it. Each step is cut in two: the executor (the model, and choosing tokens) and the
rest (scheduler, block pool, statistics), which no model hides when models get faster. `pool` runs the same requests on
pools of a thousand to a million blocks, with nothing cached and with every block cached, so that each block that is
given out is one evicted; there the executor computes nothing (`HashExecutor`). `directory` asks the gateway's table for
prefixes while it knows a thousand to a million blocks.

Each section ends with verdicts: a ratio of two ends of a curve, and whether it is within what is called constant.
"""
