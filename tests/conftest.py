"""Shared by all tests: property tests without a clock, and GPU tests that skip with a sentence."""

import pytest
from hypothesis import settings

# A busy machine must not fail a property.
settings.register_profile("moe_lab", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("moe_lab")


def pytest_collection_modifyitems(items):
    """Skip GPU tests where there is no GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: run pytest -m gpu on a machine that has one"))
