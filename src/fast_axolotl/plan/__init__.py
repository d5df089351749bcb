"""From measured runs to the next one: communication from traces, scaling, batch size, cost."""

__all__: list[str] = []
