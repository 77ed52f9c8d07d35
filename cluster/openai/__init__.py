"""The OpenAI API over HTTP.

A request's way: its body is read under a limit and parsed strictly (`body`); a pydantic model of its endpoint says what
each field may be and turns it into one or more `TextRequest`s (`completion_request`, `chat_request`,
`structure_fields`), or refuses what cannot be done here (`unsupported`); these are planned, which refuses what cannot
be served while an error can still have its own HTTP status; then the deltas of all choices are collected into one
object, or sent as server-sent events (`completions`, `chat`, `chat_message`, `reply`). The status line of a stream
waits for its first delta. All along the connection is watched (`disconnect`): when the client leaves, its sequences are
closed at once.

Whatever goes wrong, the answer is `{"error": {"message", "type", "param", "code"}}` (`error_replies`).
"""
