"""Language models: one graph for prefill, decode and mixed batches, on the pages of `ai.pagoda.PagedAttention`; or one of standard
operators, which any ONNX Runtime runs."""

from pathlib import Path

from ..error import ExportError
from ..readers import hugging_face
from . import folder

COMPUTE = ("f32", "f16", "bf16")
WEIGHTS = ("native", "int8", "int4")
KV = ("native", "int8", "int4", "fp8")
FORMS = folder.FORMS


def export(source, out, force=False, compute="f32", weights="native", kv="native", max_context=None, form="paged"):
    """Writes the model folder `out` from `source`: a Hugging Face folder, or a .gguf file.

    `compute` is the type of activations and of native weights; `weights` int8 and int4 quantise the matrices in blocks of
    32; `kv` is the format of pages; `form` is `paged`, or `functional` for a graph of standard operators. Returns what the
    folder's pagoda.json says. Raises ExportError, and leaves nothing
    behind, if anything is wrong; `out` may exist only if it is empty, or with `force` if it is a model folder.
    """
    given = (("compute", compute, COMPUTE), ("weights", weights, WEIGHTS), ("kv", kv, KV), ("form", form, FORMS))
    for name, value, known in given:
        if value not in known:
            raise ExportError(f"{name} is {value!r}: it has to be one of {', '.join(known)}")
    return folder.write(read(source), out, force, compute, weights, kv, max_context, form)


def read(source):
    """The Checkpoint in a Hugging Face folder or a .gguf file."""
    path = Path(source)
    if path.is_dir():
        return hugging_face.open_folder(path)
    if not path.is_file():
        raise ExportError(f"{source} does not exist: give a Hugging Face folder or a .gguf file")
    if path.suffix != ".gguf":
        raise ExportError(f"{source} is neither a folder nor a .gguf file: give a Hugging Face folder or a .gguf file")
    from ..readers import gguf

    return gguf.open_gguf(path)
