"""Options of feature maps and kernels are refused when a mechanism is made."""

import pytest

from unrolled import attention


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
        ("linear", {"feature_map_options": ""}),
        ("performer", {"features": ["relu"]}),
        ("rfa", {"features": ["fourier"]}),
        ("linformer", {"projection": ["linear"]}),
        ("aft", {"position_bias": ["full"]}),
    ],
)
def test_options_of_maps_and_kernels_are_refused(name, options):
    with pytest.raises(ValueError, match=r"(but must|do not fit|does not fit)"):
        attention.load(name)(8, 2, **options)
