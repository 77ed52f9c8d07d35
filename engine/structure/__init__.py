"""Structured output: a request's text is held to a JSON schema, a regular expression, a grammar or a choice.

A request brings a `Structure` (`spec.py`): plain text, which travels on the wire like every other parameter. A worker
compiles it once and gives each sequence a matcher. Before a token is sampled, the matcher is told what the sequence
has generated so far, and says which tokens may follow. It knows nothing but these tokens: after a preemption or a
migration another matcher of the same structure, told the same tokens, allows the same.

On the way from text to matcher: `grammar.py` writes it in the words of llguidance, which does the work from there on
(Earley's parser over a lexer made of derivatives of regular expressions; a token is allowed if its bytes are);
`trial.py` tries that out where it can do no harm; `compiler.py` compiles what came back alive, over the bytes of the
model's tokens (`vocabulary.py`), to the state in which a text begins (`start.py`); `matcher.py` follows one text.
"""
