"""Pagoda: inference for models that remember. Ranking models and language models, with the keys and values of their users
and conversations kept between requests, in GPU or host memory and on disk.

```python
import pagoda

with pagoda.Generator("model") as generator:
    print(generator.generate("The capital of France is", max_new_tokens=32).text)
    for token in generator.stream(messages=[{"role": "user", "content": "Hello!"}]):
        print(token.text, end="", flush=True)

with pagoda.Engine("ranker") as engine:
    answer = engine.rank(user=7, events={"movie": [17, 4], "rating": [5, 3]}, candidates={"movie": [8, 15, 16]})
    print(answer.scores)
```

Names and defaults are those of pagoda.h, the interface in C. Every object is closed by its `close` or by `with`; any
number of threads may use it at the same time, and calls do not hold the GIL. Failures are `PagodaError`s, with a class
for each status. `rank_async`, `generate_async`, `run_async` and `async for` over `Generator.stream` are for asyncio; in a
coroutine, call what else waits, such as opening a model, by `asyncio.to_thread`.

ONNX Runtime comes from the package onnxruntime or onnxruntime-gpu, whichever is installed. `pagoda.export` makes model
folders out of trained models.
"""

from . import ops
from .cancel import Cancel
from .embedding import Combiner, EmbeddingRows, Embeddings, LookupOptions, Miss, Reach, TableStats
from .engine import (
    Engine,
    EngineOptions,
    EngineStats,
    GraphShape,
    ProviderInfo,
    RankRequest,
    RankResponse,
)
from .error import (
    BusyError,
    CancelledError,
    CapacityError,
    InternalError,
    InvalidArgumentError,
    InvalidHandleError,
    IoError,
    ModelError,
    NotFoundError,
    PagodaError,
    RunError,
    Status,
    UnsupportedError,
)
from .generate import (
    BeamOptions,
    Choice,
    ContextEnd,
    EarlyStop,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    KvPolicy,
    Token,
    TokenLogprobs,
)
from .generator import Driver, Generator, GeneratorOptions, GeneratorStats
from .kv import (
    CachedOwner,
    Edited,
    KvCache,
    KvFormat,
    KvLease,
    KvOptions,
    KvRequest,
    KvSizeUnit,
    KvStats,
    KvTensor,
    LeasedOwner,
    Offload,
    Overlap,
    Tier,
    Tiers,
)
from .model import Model, ModelOptions, Optimization, Provider, ValueInfo
from .process import (
    HEADER_VERSION,
    METRICS_CONTENT_TYPE,
    LogLevel,
    abi_version,
    live_objects,
    metrics,
    set_log,
    version,
    version_number,
)
from .store import Durability, Store, StoreOptions, StoreStats
from .stream import TokenStream
from .tensor import ElementType, Tensor

__version__ = "0.1.0"
__all__ = [
    "BeamOptions",
    "BusyError",
    "CachedOwner",
    "Cancel",
    "CancelledError",
    "CapacityError",
    "Choice",
    "Combiner",
    "ContextEnd",
    "Driver",
    "Durability",
    "EarlyStop",
    "Edited",
    "ElementType",
    "EmbeddingRows",
    "Embeddings",
    "Engine",
    "EngineOptions",
    "EngineStats",
    "FinishReason",
    "GenerateRequest",
    "GenerateResponse",
    "Generator",
    "GeneratorOptions",
    "GeneratorStats",
    "GraphShape",
    "HEADER_VERSION",
    "InternalError",
    "InvalidArgumentError",
    "InvalidHandleError",
    "IoError",
    "KvCache",
    "KvFormat",
    "KvLease",
    "KvOptions",
    "KvPolicy",
    "KvRequest",
    "KvSizeUnit",
    "KvStats",
    "KvTensor",
    "LeasedOwner",
    "LogLevel",
    "LookupOptions",
    "METRICS_CONTENT_TYPE",
    "Miss",
    "Model",
    "ModelError",
    "ModelOptions",
    "NotFoundError",
    "Offload",
    "Optimization",
    "Overlap",
    "PagodaError",
    "Provider",
    "ProviderInfo",
    "RankRequest",
    "RankResponse",
    "Reach",
    "RunError",
    "Status",
    "Store",
    "StoreOptions",
    "StoreStats",
    "TableStats",
    "Tensor",
    "Tier",
    "Tiers",
    "Token",
    "TokenLogprobs",
    "TokenStream",
    "UnsupportedError",
    "ValueInfo",
    "abi_version",
    "live_objects",
    "metrics",
    "ops",
    "set_log",
    "version",
    "version_number",
]
