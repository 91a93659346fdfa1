"""Data: where examples come from (sources), what happens to one (transforms), in which order (loader)."""
