"""Is everything right on this GPU? `python gpu/test.py`, or make gpu-test; docs/guide/gpus.md says what is checked."""

from checkout import checkout_on_path

if __name__ == "__main__":
    with checkout_on_path():
        import cases_kernels
        import cases_library
        import cases_memory
        import cases_pool
        import cases_runs
        from harness import main

        main(
            "gpu-test",
            [*cases_kernels.CASES, *cases_pool.CASES, *cases_library.CASES, *cases_runs.CASES, *cases_memory.CASES],
        )
