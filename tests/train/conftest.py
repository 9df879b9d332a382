"""torchtitan is imported once, here: it takes seconds, and the forked ranks share it."""

import warnings

with warnings.catch_warnings():
    # Importing it imports torch's compiler, which uses what torch itself deprecated.
    warnings.simplefilter("ignore")
    try:
        import torchtitan.trainer  # noqa: F401
    except ModuleNotFoundError:  # the tests that need it are skipped
        pass
