"""NCCL between ranks that share one GPU: `python gpu/nccl.py`, or make gpu-nccl; docs/guide/gpus.md."""

from checkout import checkout_on_path

if __name__ == "__main__":
    with checkout_on_path():
        from harness import main

        main("gpu-nccl", ["cases_nccl"])
