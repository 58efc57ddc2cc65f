import re

import pytest

from unrolled.training import TrainConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps is 0, but must be an integer of at least 1"),
        ({"steps": 1.5}, "steps is 1.5, but must be an integer of at least 1"),
        ({"batch_size": True}, "batch_size is True, but must be an integer of at least 1"),
        ({"warmup_steps": -1}, "warmup_steps is -1, but must be an integer of at least 0"),
        ({"threads": 0}, "threads is 0, but must be an integer from 1 to 1024, or None"),
        ({"lr": "1e-3"}, "lr is '1e-3', but must be a number above 0"),  # how YAML 1.1 reads 1e-3
        ({"lr": float("nan")}, "lr is nan, but must be a number above 0"),
        ({"lr": 0}, "lr is 0, but must be a number above 0"),
        ({"lr": 0.1, "min_lr": 0.2}, "min_lr is 0.2, but must be at most lr = 0.1"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0, but must be a number above 0, or None"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1, but must be a number of at least 0"),
        ({"betas": (0.9,)}, "betas is (0.9,), but must be a list of 2 numbers in [0, 1)"),
        ({"betas": (0.9, 1.0)}, "betas is (0.9, 1.0), but must be a list of 2 numbers in [0, 1)"),
        ({"optimizer": "sgd"}, "optimizer is 'sgd', but must be one of 'adamw', 'radam', 'muon'"),
        (
            {"schedule": ["cosine"]},
            "schedule is ['cosine'], but must be one of 'cosine', 'plateau', 'constant', 'inverse_sqrt'",
        ),
        ({"eps": 0}, "eps is 0, but must be a number above 0"),
        ({"redraw_every": 0}, "redraw_every is 0, but must be an integer of at least 1, or None"),
        (
            {"schedule": "inverse_sqrt", "warmup_steps": 0},
            "warmup_steps is 0, but must be at least 1 with schedule 'inverse_sqrt'",
        ),
        (
            {"carry_state": True, "redraw_every": 5},
            "carry_state is True, but must be False with redraw_every: sums of the old features cannot "
            "continue with the new ones",
        ),
        ({"bf16": "yes"}, "bf16 is 'yes', but must be True or False"),
    ],
)
def test_a_wrong_value_gets_one_sentence(changes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TrainConfig(**changes)


def test_betas_may_be_a_list_as_in_yaml():
    assert TrainConfig(betas=[0.8, 0.9]) == TrainConfig(betas=(0.8, 0.9))


def test_only_these_settings_may_change_on_resume():
    free = {"checkpoint_every", "log_every", "threads", "gradient_checkpointing"}
    free |= {"compile", "segment", "shard", "sequence"}
    ends = {"steps", "seconds", "clock"}
    for schedule, others in {
        "cosine": {"eval_every"},
        "plateau": ends,
        "constant": ends | {"eval_every"},
        "inverse_sqrt": ends | {"eval_every"},
    }.items():
        assert TrainConfig(schedule=schedule).free_on_resume() == free | others
