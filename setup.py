"""Wheels with the call path in C++: ``PYGRAPH_PREBUILT=1 pip wheel --no-build-isolation .`` (``make wheel``).

Such a wheel is for the installed Python and torch: with another version of torch the extension that it carries is not
loaded, and one is built on first use, as by the plain wheel.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from setuptools import setup

ROOT = Path(__file__).parent


def options() -> dict[str, Any]:
    """The extension, and what builds it."""
    sys.path.insert(0, str(ROOT))
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    from pygraph.process import extension_source as source

    class Build(BuildExtension):
        def run(self) -> None:
            super().run()
            (library,) = map(Path, self.get_outputs())
            source.note_of(library).write_text(source.identity(), encoding="utf-8")

    file = str(Path("pygraph", "native", "dispatch.cpp"))
    module = CppExtension(f"pygraph.native.{source.NAME}", [file], extra_compile_args=[*source.FLAGS, "-g0"])
    return {"ext_modules": [module], "cmdclass": {"build_ext": Build.with_options(use_ninja=False)}}


setup(**(options() if os.environ.get("PYGRAPH_PREBUILT") == "1" else {}))
