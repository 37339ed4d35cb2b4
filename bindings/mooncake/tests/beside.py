"""Installs and removes the wheel of Millstream and that of the original, in both orders, in this environment.

``beside.py ORIGINAL WHEEL...``: the original as pip knows it, and the files of ours.
"""

import os
import subprocess
import sys
import sysconfig

ORIGINAL, *OURS = sys.argv[1:]
FOLDER = os.path.join(sysconfig.get_path("purelib"), "mooncake")

# Which module is active, whether others of the original's can be imported then, and what was warned of.
LOOK = """
import sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from mooncake.engine import TransferEngine
kind = type(TransferEngine).__module__ == "builtins" and "millstream" or "original"
assert TransferEngine().get_batch_transfer_status([]) == 0
try:
    import mooncake.store
    store = "store"
except ImportError:
    store = "no store"
assert store == "store" or not [name for name in sys.modules if name.startswith("mooncake.store")]
named = [who for who in ("Millstream's", "original's") if any(f"is {who}" in str(w.message) or f"is the {who}" in str(w.message) for w in caught)]
sys.stdout.write(f"{kind}, {store}, {len(named)} named {named[0] if named else ''}")
"""


def run(*arguments, **environment):
    values = {name: value for name, value in os.environ.items() if name != "MILLSTREAM_MOONCAKE"}
    done = subprocess.run(
        [sys.executable, *arguments], env=dict(values, **environment), capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.exit(f"{arguments}: {done.stdout}{done.stderr}")
    return done.stdout.strip()


def pip(*arguments):
    return run("-m", "pip", *arguments, "--quiet", "--disable-pip-version-check")


def expect(what, expected, **environment):
    found = run("-I", "-c", LOOK, **environment)
    if found != expected:
        sys.exit(f"{what}: {found!r} in place of {expected!r}")
    print("beside the original:", what, "->", found)


def install_original():
    pip("install", "--no-deps", ORIGINAL)


def install_ours():
    pip("install", "--no-index", *OURS)


def remove_original():
    pip("uninstall", "--yes", ORIGINAL.partition("=")[0])


def remove_ours():
    pip("uninstall", "--yes", "millstream-mooncake")


def files():
    return {
        os.path.join(folder, name): os.path.getsize(os.path.join(folder, name))
        for folder, _, names in os.walk(FOLDER)
        for name in names
        if not name.endswith(".pyc")
    }


def both(order):
    expect(f"both, {order}", "original, store, 1 named original's")
    expect(f"both, {order}, ours chosen", "millstream, no store, 1 named Millstream's", MILLSTREAM_MOONCAKE="millstream")
    expect(f"both, {order}, the original chosen", "original, store, 0 named", MILLSTREAM_MOONCAKE="original")


def main():
    install_ours()
    expect("ours", "millstream, no store, 0 named")
    own = files()
    install_original()
    both("ours first")
    remove_original()
    expect("ours, the original removed", "millstream, no store, 0 named")
    assert files() == own, "removing the original has changed ours"
    remove_ours()
    assert not files(), files()
    install_original()
    theirs = files()
    install_ours()
    both("the original first")
    remove_ours()
    expect("the original, ours removed", "original, store, 0 named")
    assert files() == theirs, "removing ours has changed the original"
    install_ours()
    remove_original()
    expect("ours again", "millstream, no store, 0 named")


main()
