"""The demo that `make demo` runs: what accumulation saves and what it must not change, on this machine."""
