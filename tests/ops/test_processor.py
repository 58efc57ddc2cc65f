"""What a processor can do is read from what the system says about it."""

import platform

import pytest
import torch

from unrolled.ops import processor


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flags\t\t: fma avx512_bf16 avx512_fp16\n", True),  # Zen 4
        ("flags\t\t: amx_tile amx_bf16 amx_int8\n", True),
        ("Features\t: asimd i8mm bf16\n", True),  # Arm
        ("flags\t\t: fma avx512f avx512_vnni\n", False),
    ],
)
def test_products_of_bf16_on_a_processor(text, expected, monkeypatch):
    monkeypatch.setattr(processor, "description", lambda: text)
    assert processor.multiplies_bf16(torch.device("cpu")) == expected


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_products_of_bf16_on_a_gpu(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert processor.multiplies_bf16(torch.device("cuda:1")) == expected


def test_without_cpuinfo_the_system_says_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(processor, "Path", lambda _: tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    assert processor.description.__wrapped__() == "arm"
