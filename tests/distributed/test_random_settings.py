"""Whether random command lines train or are refused in one line: nine of those that chaos tries by the hundred."""

from chaos.configs import measure_configs


def test_random_command_lines_train_or_are_refused() -> None:
    figures = measure_configs(9, seed=0)
    assert figures["configs_failed"] == 0
    assert figures["configs_tried"] == 9
    assert figures["configs_trained"] >= 1
