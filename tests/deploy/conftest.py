"""Charts that were rendered."""

import pytest
import yaml
from chart_support import VALUES, helm


@pytest.fixture(scope="module")
def rendered():
    """The documents of a set of values, rendered once."""
    made = {}

    def rendered(name):
        if name not in made:
            done = helm("template", VALUES[name], "ferry", "--namespace", "inference")
            assert done.returncode == 0, done.stderr
            made[name] = [document for document in yaml.safe_load_all(done.stdout) if document]
        return made[name]

    return rendered
