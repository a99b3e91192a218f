"""`kvferry` whose engine keeps back the last step of a prompt while a file exists: `early_serve.py FILE serve …`."""

import sys
from pathlib import Path

from kvferry.cli.main import main
from kvferry.connectors.transformers import core, scheduler

gate = Path(sys.argv.pop(1))


class GatedScheduler(scheduler.FerryScheduler):
    def schedule_batch(self, token_budget, cache_budget):
        """Nothing is scheduled, but commands are still obeyed between the steps that are not made."""
        left = [len(state.remaining_prefill_tokens) for state in self.active_requests.values()]
        if gate.exists() and any(0 < num_tokens <= token_budget for num_tokens in left):
            return [], False, 0, 0
        return super().schedule_batch(token_budget, cache_budget)


core.FerryScheduler = GatedScheduler
main()
