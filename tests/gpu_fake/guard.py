"""Loads the stand-in of a CUDA device before torch, whose CPU builds have none: compiled once, and
kept with the system's temporary files. (A CUDA build on a machine without a GPU brings its own.)"""

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def load() -> None:
    assert "torch" not in sys.modules, "the stand-in comes before torch"
    source = Path(__file__).with_name("no_cuda.cpp")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    versions = source.read_bytes() + (root / "version.py").read_bytes() + str(root).encode()
    key = hashlib.sha1(versions).hexdigest()[:12]
    library = Path(tempfile.gettempdir()) / f"furlong_no_cuda_{os.getuid()}_{key}.so"
    if not library.exists():
        own, include = f"{library}.{os.getpid()}", root / "include"
        subprocess.run(
            ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{include}",
             f"-I{include}/torch/csrc/api/include", str(source), "-o", own,
             f"-L{root}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root}/lib"],
            check=True,
        )  # fmt: skip
        os.replace(own, library)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
