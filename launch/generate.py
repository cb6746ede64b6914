"""Continue a text with a finished run: `python launch/generate.py RUN "text"`."""

from adloco_dist.tools.generate import main

if __name__ == "__main__":
    main()
