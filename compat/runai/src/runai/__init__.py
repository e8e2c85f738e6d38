"""Run:AI's gradient accumulation, on top of gradaccum: import `runai.ga.torch` or `runai.ga.keras`."""
