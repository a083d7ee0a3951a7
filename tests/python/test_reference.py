"""The metric sees planted errors."""

import pytest
import torch
from reference import HEAD_AXIS, assert_close


@pytest.mark.parametrize("name,shape", [
    ("o", (1, 50, 8, 16)), ("dg", (1, 50, 8)), ("dbeta", (50, 8)), ("final_state", (2, 8, 16, 16)),
])
@pytest.mark.parametrize("fault", ["sign", "nan", "last element", "one head", "shape"])
def test_planted_errors_are_seen(name, shape, fault):
    ref = torch.randn(shape, dtype=torch.float64)
    assert_close(name, ref.float(), ref, 1e-6)
    x = ref.clone()
    if fault == "sign":
        x = -x
    elif fault == "nan":
        x.flatten()[3] = float("nan")
    elif fault == "last element":
        x.flatten()[-1] += 1
    elif fault == "one head":
        head = {"o": x[..., 5, :], "final_state": x[:, 5]}.get(name, x[..., 5])
        ref.select(HEAD_AXIS[name], 5).mul_(1e-6)  # nothing to the whole tensor's error
        x = ref.clone()
        x.select(HEAD_AXIS[name], 5).mul_(1.001)
    else:
        x = x[:, :-1]
    with pytest.raises(AssertionError, match=name):
        assert_close(name, x, ref, 1e-6)
