"""From measured runs to the next one: communication, memory, time and money."""
