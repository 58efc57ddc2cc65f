"""What a processor can do is read from what the system says about it."""

import platform

import pytest
import torch

from unrolled.ops import processor


@pytest.mark.parametrize(
    ("text", "gpu", "expected"),
    [
        ("flags\t\t: fma avx512_bf16 avx512_fp16\n", False, True),  # Zen 4
        ("flags\t\t: amx_tile amx_bf16 amx_int8\n", False, True),
        ("Features\t: asimd i8mm bf16\n", False, True),  # Arm
        ("flags\t\t: fma avx512f avx512_vnni\n", False, False),
        ("flags\t\t: fma avx512f avx512_vnni\n", True, True),
    ],
)
def test_products_of_bf16(text, gpu, expected, monkeypatch):
    monkeypatch.setattr(processor, "description", lambda: text)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert processor.multiplies_bf16() == expected


def test_without_cpuinfo_the_system_says_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(processor, "Path", lambda _: tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    assert processor.description.__wrapped__() == "arm"
