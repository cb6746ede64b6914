"""Continue a text with a finished run: `python launch/generate.py RUN "text"`."""

from adloco_dist.command import run_command

if __name__ == "__main__":
    run_command("adloco_dist.tools.generate")
