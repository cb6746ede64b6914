"""How fast it is on this GPU: `python gpu/bench.py`, or make gpu-bench; docs/guide/gpus.md."""

from checkout import checkout_on_path

if __name__ == "__main__":
    with checkout_on_path():
        from harness import main

        main("gpu-bench", ["cases_updates", "cases_bench"])
