"""Is everything right on this GPU? `python gpu/test.py`, or make gpu-test; docs/guide/gpus.md says what is checked."""

from checkout import checkout_on_path

MODULES = ("cases_kernels", "cases_pool", "cases_averages", "cases_library", "cases_runs", "cases_memory")

if __name__ == "__main__":
    with checkout_on_path():
        from harness import main

        main("gpu-test", MODULES)
