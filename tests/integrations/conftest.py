"""One import of every framework, before any rank is forked."""

import warnings

with warnings.catch_warnings():  # what they say of each other while they are imported
    warnings.simplefilter("ignore")
    import accelerate  # noqa: F401
    import lightning.pytorch  # noqa: F401
    import transformers  # noqa: F401
