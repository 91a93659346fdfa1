"""Every test runs on 8 simulated CPU devices with strict types; the settings must precede jax's import."""

import os
import signal
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# XLA:CPU sizes its thread pool by NPROC; with fewer threads than devices in one collective it deadlocks.
os.environ["NPROC"] = "16"

import jax

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "jax"

# A shell starts what it puts in the background with SIGINT ignored, and the tests' processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
