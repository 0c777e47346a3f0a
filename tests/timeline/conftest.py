"""The first example of a test compiles, so hypothesis must not hold examples to a deadline."""

from hypothesis import settings

settings.register_profile("timeline", deadline=None)
settings.load_profile("timeline")
