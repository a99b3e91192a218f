"""The control channel in a storm of nonsense; `make fuzz FRAMES=1000000` runs the same at length."""

import pytest
from storm import make_token, storm, verdict

FRAMES = 10_000


@pytest.mark.parametrize("has_token", [False, True], ids=["no token", "token"])
def test_a_rank_weathers_a_storm_and_serves_its_peer(tmp_path, has_token):
    outcome = storm(FRAMES, 7, make_token(tmp_path) if has_token else "")
    assert verdict(outcome) == []
    assert outcome.counts["frames_refused malformed"] > FRAMES / 10
    assert outcome.counts["connections_refused stranger"] > 0
