"""The entry point of the backend: ``torch.compile(backend="pygraph")`` imports this module to find it.

Inductor takes a second or two to load. It is loaded when ``torch.compile`` is called, as for torch's own backend, not
in the first call of what is compiled; and not by ``import pygraph``, for those who do not compile.
"""

import torch._inductor.compile_fx as compile_fx  # noqa: F401  # pyright: ignore[reportUnusedImport]

from pygraph.interop.dynamo import backend as backend
