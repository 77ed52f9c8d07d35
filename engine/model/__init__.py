"""The model: the life of a weight.

A name or a path is resolved to a Hugging Face folder or one GGUF file (`locate`). Its description becomes a
`ModelConfig` (`config`; read from `config.json` by `huggingface`, from GGUF metadata by `gguf_config`), which needs no
torch, so that the gateway can read it too. Its tensors are read one by one through a `TensorSource`
(`safetensors_source`, `gguf_source`), under one set of names, checked against the shapes that the config implies, fused
and packed for the matrix multiplications (`weights`, `linear`), and never change again: from then on they are a
`Llama` (`llama`), a function from tokens, positions and the block pool to logits.

Whatever is missing, cut short or not supported ends in a `ModelLoadError` of one sentence that names it.
"""
