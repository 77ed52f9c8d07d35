"""What paging the KV cache gives and what it costs: the claims of the literature, measured on this engine's own pool.

The life of a claim. A *section* measures it: `memory` lets requests of given lengths run through memories of several
kinds and looks which share of each holds tokens; `blocks` times the decode kernel at block sizes of 1 to 128, and on
KV that is not paged at all; `layouts` times the scores of a query on three layouts of K; `virtual` maps pages under one
contiguous range a request instead. A section fills tables, each with the published figures that it stands beside.
`__main__` prints them, writes them as JSON and hands them to `plots`.

    python -m benchmarks.paging [--sections memory,blocks,layouts,virtual] [--traces FOLDER] [--json FILE] [--plots …]

Published figures are of Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention
(SOSP 2023), and of Prabhu et al., vAttention (2024).
"""
