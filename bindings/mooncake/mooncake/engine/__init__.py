"""``mooncake.engine``, done by Millstream, or the original where that is installed too.

Python takes this folder before the original's file ``engine.so`` beside it. Parts of both are never in use together.
"""

import importlib.machinery as _machinery
import importlib.util as _util
import os as _os
import sys as _sys
import warnings as _warnings

_CHOICE = "MILLSTREAM_MOONCAKE"


def _original():
    """The file of the original's module, if it is installed."""
    for folder in _sys.modules["mooncake"].__path__:
        for suffix in _machinery.EXTENSION_SUFFIXES:
            path = _os.path.join(folder, "engine" + suffix)
            if _os.path.isfile(path):
                return path
    return None


class _Closed:
    """Finds no module of the original any more: nothing of it works with this engine."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.startswith("mooncake.") and not name.startswith(__name__):
            raise ModuleNotFoundError(
                f"{name} is the original's, and mooncake.engine is Millstream's: "
                f"unset {_CHOICE} to use the original",
                name=name,
            )
        return None


def _become(path):
    """Has the original take this module's place."""
    loader = _machinery.ExtensionFileLoader(__name__, path)
    spec = _util.spec_from_file_location(__name__, path, loader=loader)
    module = _util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _sys.modules[__name__] = module


def _close():
    """Takes away what the original's package has imported by itself."""
    for name in [name for name in _sys.modules if name.startswith("mooncake.")]:
        if name != __name__:
            del _sys.modules[name]
            _sys.modules["mooncake"].__dict__.pop(name.partition(".")[2], None)
    _sys.meta_path.insert(0, _Closed)


def _choose():
    """Whether this module is the one."""
    path = _original()
    chosen = _os.environ.get(_CHOICE, "")
    if chosen not in ("", "millstream", "original"):
        raise ImportError(f"{_CHOICE}={chosen}: it is millstream or original")
    if path is None:
        if chosen == "original":
            raise ImportError(f"{_CHOICE}=original, and the original is not installed")
        return True
    if chosen == "millstream":
        _warnings.warn(
            f"mooncake.engine is Millstream's, as {_CHOICE} says; the original is installed too, and not used",
            stacklevel=2,
        )
        _close()
        return True
    if not chosen:
        _warnings.warn(
            "mooncake.engine is the original's; millstream-mooncake is installed too, and not used: "
            f"uninstall the original, or set {_CHOICE}=millstream",
            stacklevel=2,
        )
    _become(path)
    return False


if _choose():
    from ._millstream import *  # noqa: F403
    from ._millstream import __all__  # noqa: F401
