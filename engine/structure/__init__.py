"""Structured output: a request's text is held to a JSON schema, a regular expression, a grammar or a choice.

A request brings a `Structure` (`spec.py`): plain text, which travels on the wire like every other parameter. A worker
compiles it once and gives each sequence a matcher. Before a token is sampled, the matcher is told what the sequence
has generated so far, and says which tokens may follow. It knows nothing but these tokens: after a preemption or a
migration another matcher of the same structure, told the same tokens, allows the same.
"""
