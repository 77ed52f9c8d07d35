"""What keeps a structure from being compiled, beside itself."""


class CompilationFailed(Exception):
    """Whether a structure can be used was not found out: no process, no memory, no time, or the worker ends.

    Nothing wrong with the structure is known: it may be tried again, here or elsewhere.
    """
