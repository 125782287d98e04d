"""Writes the files beside this one: one table as NumPy and safetensors write it. Needs numpy, safetensors, ml_dtypes."""

from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

here = Path(__file__).parent
keys = np.array([-1, 1 << 40, 7], dtype=np.int64)
rows = (np.arange(3)[:, None] * 10 + np.arange(4) + 0.5).astype(np.float32)
quantized = (rows * 2).astype(np.int8)
scales = np.full(3, 0.5, dtype=np.float32)

save_file({"keys": keys, "rows": rows}, here / "f32.safetensors", metadata={"made by": "make.py"})
save_file({"weight": rows.astype(np.float16)}, here / "f16.safetensors")
save_file({"keys": keys.astype(np.uint64), "embeddings": rows.astype(ml_dtypes.bfloat16)}, here / "bf16.safetensors")
save_file({"keys": keys, "rows": quantized, "scales": scales}, here / "i8.safetensors")

for version in (1, 2, 3):
    with open(here / f"v{version}.npy", "wb") as file:
        np.lib.format.write_array(file, rows, version=(version, 0))
for folder, parts in {
    "f16": {"rows": rows.astype(np.float16), "keys": keys},
    "i8": {"rows": quantized, "keys": keys.astype(np.uint64), "scales": scales},
}.items():
    (here / folder).mkdir(exist_ok=True)
    for name, array in parts.items():
        np.save(here / folder / f"{name}.npy", array)
np.save(here / "fortran.npy", np.asfortranarray(rows))
np.save(here / "big_endian.npy", rows.astype(">f4"))
