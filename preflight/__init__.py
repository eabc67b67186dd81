"""Before a run is paid for: what it needs, what it compiles, how long it waits."""
