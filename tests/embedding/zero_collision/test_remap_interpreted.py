"""The Triton kernels of zero-collision ids, in Triton's interpreter, against the C++ core and the reference."""

from __future__ import annotations

from tests.models.interpreter import run_interpreted

SCRIPT = """
from hypothesis import HealthCheck, given, settings, strategies as st
from tests.embedding.zero_collision.kernels import compare_with_core, compare_with_reference, random_case
from tests.embedding.zero_collision.test_remap import batches, evictions, layouts
import torch
cpu = torch.device("cpu")
for policy in (None, "ttl", "lru"):
    assert compare_with_core(policy, cpu, steps=4, batch=60) > 0
compare_with_reference(**random_case(0), device=cpu)

@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(layout=layouts(), eviction=evictions, steps=batches(4), left_out=st.sampled_from([0, 3]))
def any_ids(layout, eviction, steps, left_out):
    compare_with_reference(layout, eviction, steps, left_out, cpu)

any_ids()
"""


def test_interpreted_kernels_equal_the_core() -> None:
    run_interpreted(SCRIPT)
