"""FlashSAC's configuration."""

import pytest

from edenrl.config import FlashSACConfig, FlashSACRunConfig


def test_length_is_frames_or_iterations():
    assert FlashSACRunConfig(total_frames="1e6").total_frames == 1_000_000
    assert FlashSACRunConfig(max_iterations=5).total_frames is None
    with pytest.raises(ValueError, match="neither was given"):
        FlashSACRunConfig()
    with pytest.raises(ValueError, match="both, 3 and 4, was given"):
        FlashSACRunConfig(total_frames=3, max_iterations=4)


def test_warmup_shrinks_with_the_run(caplog):
    algorithm = FlashSACConfig(min_buffer=1000)
    assert algorithm.warmup_frames(10_000) == 1000 and not caplog.text
    assert algorithm.warmup_frames(5000) == 500
    assert "min_buffer is 500 in this run of 5000 frames, not 1000" in caplog.text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(min_buffer=10, buffer_size=5), "lower min_buffer or raise buffer_size"),
        (dict(gamma=1.1), "less than or equal to 1"),
        (dict(batch_size=1), "greater than or equal to 2"),
        (dict(precision="int8"), "'float32', 'bfloat16' or 'float16'"),
    ],
)
def test_settings_out_of_range(values, message):
    with pytest.raises(ValueError, match=message):
        FlashSACConfig(**values)


def test_published_sizes_on_a_cpu_are_pointed_out(caplog):
    small = FlashSACRunConfig(total_frames=1, algorithm=dict(batch_size=128))
    for cfg, device in ((small, "cpu"), (FlashSACRunConfig(total_frames=1), "cuda")):
        cfg.warn(device, iterations=1)
    assert not caplog.records
    FlashSACRunConfig(total_frames=1).warn("cpu", iterations=1)
    assert "batch_size 2048" in caplog.text and "--profile cpu" in caplog.text
