"""Between text and token ids, in both directions.

On its way in a conversation is checked (`messages`) and becomes one string by the model's chat template, and a string
becomes token ids by the model's tokenizer. On its way out each token's bytes pass through a detokenizer, which lets
whole characters out, and through a stop matcher, which keeps back whatever could still turn into a stop string.
"""
