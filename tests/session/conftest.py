"""What tests of staging memory change and watch."""

import pytest
from staging_cases import source

from kvferry.plan.slots.slot_plan import SlotPlan
from kvferry.session.target.reads import slot_pipeline


@pytest.fixture
def three_slots_at_a_time(monkeypatch):
    """Of the four that the request has."""
    monkeypatch.setattr(slot_pipeline, "WINDOW", 3)


@pytest.fixture
def planned(monkeypatch):
    """The stretches that are planned, in this order."""
    found, plan = [], SlotPlan._plan

    def acknowledged(self, numbers):
        found.extend(numbers)
        return plan(self, numbers)

    monkeypatch.setattr(SlotPlan, "_plan", acknowledged)
    return found


@pytest.fixture
def session():
    return source()
