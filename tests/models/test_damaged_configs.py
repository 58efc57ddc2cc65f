"""No value in a config is silently wrong, ends in a traceback, or takes long to refuse."""

import json
import math
import time

import pytest
from small_models import FIELDS, small_model

from unrolled import models

WRONG = [None, -1, 0, 10**9, 10**30, 1.5, math.nan, math.inf, "x", "", [], {}, True, [[1]], [10**9] * 2]
WRONG += [{"linear": {"feature_map": 3}}, {"linear": {"no_option": 3}}]


def test_every_kind_has_a_small_model():
    assert set(FIELDS) == set(models.KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FIELDS)
def test_any_other_value_of_any_field_is_refused_in_one_sentence(kind, tmp_path):
    small_model(kind).save(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for field, value in config.items():
        for wrong in WRONG:
            if wrong == value and type(wrong) is type(value):
                continue
            file.write_text(json.dumps(config | {field: wrong}))
            began = time.process_time()
            with pytest.raises((ValueError, NotImplementedError)) as error:
                models.load(tmp_path)
            assert "\n" not in str(error.value)
            if wrong is math.nan and field != "model":  # which no field may be
                assert f"{field} is nan, but must be" in str(error.value)
            assert time.process_time() - began < 10, (field, wrong)
