"""What can go wrong with a model's files: one tree, each class with a stable `code`.

Messages are one line: what was got, what was expected, what to do. Holds no torch.
"""

from __future__ import annotations


class ModelError(ValueError):
    """A model cannot be served as asked. `code` names the kind of failure."""

    code = "model_error"


class ModelNotFoundError(ModelError):
    """No model at the given path, or the default model's package is not installed."""

    code = "model_not_found"


class UnsupportedModelError(ModelError):
    """The files are readable, but ask for something the engine does not implement."""

    code = "model_unsupported"


class BrokenModelError(ModelError):
    """The files contradict themselves: a tensor is missing, has another shape, is truncated."""

    code = "model_broken"


class UnsupportedDeviceError(ModelError):
    """The requested device is not available to this process."""

    code = "device_unsupported"


class ChatTemplateError(ModelError):
    """The model has no chat template, or its template refuses the messages."""

    code = "chat_template"
