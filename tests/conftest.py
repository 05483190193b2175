"""Settings of the whole suite."""

import os

from hypothesis import settings

# `make fuzz` looks at many more examples than a test run has time for.
settings.register_profile("fuzz", max_examples=2000, deadline=None)
settings.register_profile("default", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
