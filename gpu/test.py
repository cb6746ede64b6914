"""Is everything right on this GPU? `python gpu/test.py`, or make gpu-test; docs/guide/gpus.md says what is checked."""

from checkout import checkout_on_path

if __name__ == "__main__":
    with checkout_on_path():
        import cases_averages
        import cases_kernels
        import cases_library
        import cases_memory
        import cases_pool
        import cases_runs
        from harness import main

        modules = (cases_kernels, cases_pool, cases_averages, cases_library, cases_runs, cases_memory)
        main("gpu-test", [case for module in modules for case in module.CASES])
