"""Tools: functions of the client's that the model may ask it to call.

The way of a tool: it is checked (`tool`), and with it what the model may and must do (`tool_use`). The model is told of
it by its chat template, or, where that knows no tools, by a system message of ours (`conversation`, `hermes_messages`).
The model answers with text, in which calls are written as it was trained to (`call_style`); a `CallParser` takes that
text apart as it comes, into what is said to the user and the calls (`hermes_parser` and `mistral_parser`, both by
`marked_parser`; `llama_parser`, `forced_parser`); what may be a call or not is kept in a `CallScan`. Where a call is
demanded, the text is held to a grammar that leaves nothing else (`call_structure`).

Nothing here knows HTTP or gRPC: both front doors use it alike.
"""
