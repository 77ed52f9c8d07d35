"""What is wrong with a model's files."""


class ModelLoadError(ValueError):
    """A model cannot be loaded; the message is one sentence that names the file, the thing and what was expected."""
