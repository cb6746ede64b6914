"""What forked ranks find imported: nothing here may run a tensor operation (testing/processes.py)."""

import gc

import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401

import adloco_dist.config.compose
import adloco_dist.train  # noqa: F401

gc.collect()
gc.freeze()  # else every rank's first collections look through all that was imported
