"""Options of a wrong type or size are refused when a mechanism is made, by their name."""

import pytest

from unrolled import attention

OPTIONS = {
    "aft": ["max_length", "bias_rank"],
    "gated_linear": ["gate_rank", "temperature"],
    "linformer": ["rank", "max_length"],
    "nystromformer": ["n_landmarks", "iterations", "conv_width"],
    "perceiver": ["n_latents"],
    "performer": ["n_features", "seed"],
    "rfa": ["n_features", "seed"],
}
CASES = [(name, option) for name, options in OPTIONS.items() for option in options]


@pytest.mark.parametrize("value", ["x", -1, 2.5, True, float("nan")])
@pytest.mark.parametrize(("name", "option"), CASES)
def test_wrong_options_are_refused_by_name(name, option, value):
    if (option, value) == ("temperature", 2.5):
        pytest.skip("which is a temperature")
    causal = name == "gated_linear"
    with pytest.raises(ValueError, match=f"{option} is"):
        attention.load(name)(8, 2, causal=causal, **{option: value})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("linear", {"feature_map": "elu", "feature_map_options": {"bogus": 1}}),
        ("linear", {"feature_map": "dpfp", "feature_map_options": {"nu": 1.5}}),
        ("linear", {"feature_map": "polynomial", "feature_map_options": {"offset": float("nan")}}),
        ("linear", {"feature_map": "cosformer", "feature_map_options": {"max_length": 0}}),
        ("similarity", {"similarity": "polynomial", "similarity_options": {"degree": 0.5}}),
        ("similarity", {"similarity": "rbf", "similarity_options": {"scale": -1.0}}),
        ("similarity", {"similarity_options": {"bogus": 1}}),
    ],
)
def test_options_of_maps_and_kernels_are_refused(name, options):
    with pytest.raises(ValueError, match=r"(but must be|do not fit|does not fit)"):
        attention.load(name)(8, 2, **options)
