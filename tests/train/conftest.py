"""torchtitan is imported once, here: it takes seconds, and the forked ranks share it."""

import contextlib
import warnings

with warnings.catch_warnings():
    # Importing it imports torch's compiler, which uses what torch itself deprecated.
    warnings.simplefilter("ignore")
    with contextlib.suppress(ModuleNotFoundError):  # the tests that need it are skipped
        import torchtitan.trainer  # noqa: F401
