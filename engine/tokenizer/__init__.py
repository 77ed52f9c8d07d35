"""Between text and token ids, for the gateway and for workers alike.

`tokenizer.py` is what both use; `folder_tokenizer.py` and `gguf_tokenizer.py` read one from a model's files, and
`token_bytes.py` says what each token stands for, in bytes. A gateway encodes prompts and decodes what comes back; a
worker needs the bytes to hold its output to a structure.
"""
