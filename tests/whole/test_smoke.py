"""The script that checks an installed package passes here, and can fail."""

import pytest
import smoke


@pytest.mark.parametrize("check", smoke.CHECKS, ids=lambda check: check.__name__)
def test_the_smoke_test_passes(check):
    check()


@pytest.mark.parametrize("check", [smoke.backward, smoke.func_grad, smoke.policy])
def test_an_identity_in_place_of_remat_fails_it(check, monkeypatch):
    monkeypatch.setattr(smoke.remat, "remat", lambda fn, **options: fn)
    with pytest.raises(AssertionError, match="Counter"):
        check()
