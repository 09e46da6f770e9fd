"""What all tests share: how hard hypothesis tries. `pytest --hypothesis-profile=thorough` tries harder."""

from hypothesis import settings

settings.register_profile("quick", max_examples=32, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile("quick")
