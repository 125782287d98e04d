"""From a trained model to a model folder: of ranking models by `export`, of language models by `export_language_model`."""

import importlib.util

for _needed in "onnx", "ml_dtypes", "safetensors":
    if importlib.util.find_spec(_needed) is None:
        raise ModuleNotFoundError(f"the exporter needs the package {_needed}: pip install 'pagoda[export]'", name=_needed)

from . import model as _model
from .error import ExportError
from .hstu import checkpoint as _checkpoint
from .hstu import config as _config
from .hstu import folder as _folder
from .llm import export as export_language_model

__all__ = ["ExportError", "export", "export_language_model"]


def export(checkpoint, config, out, force=False, max_model_bytes=_model.MAX_MODEL_BYTES):
    """Writes the model folder `out` from the weights in the file `checkpoint` and the settings in the file `config`.

    Returns what the folder's pagoda.json says. Raises ExportError, and leaves nothing behind, if anything is wrong;
    `out` may exist only if it is empty, or with `force` if it is a model folder. Weights of more than
    `max_model_bytes` go into a file beside model.onnx; the default is what ONNX allows.
    """
    parsed = _config.load(config)
    return _folder.write(parsed, _checkpoint.open_file(checkpoint), out, force, max_model_bytes)
