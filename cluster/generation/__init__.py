"""Between the messages of `tandem.v1.Generation` and what the gateway works with.

A call's life, message by message: its metadata give it its ids (`metadata`); the input becomes a prompt (`prompt`), a
conversation by way of the model's chat template (`chat`), and the sampling parameters become options (`options`); the
deltas of each choice become chunks and, joined, its complete message (`choice`); and the trailers tell who served it
and where its time went (`metadata`). `cluster.service` is the skin that gRPC calls.
"""
