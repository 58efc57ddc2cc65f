"""The structs and enums that Python fills are those of the C header that the library was compiled from."""

import shutil
import subprocess
from pathlib import Path
from struct import calcsize, pack

import pytest

from unrolled.ops import native
from unrolled.ops.linear.native import FEATURE_MAPS
from unrolled.ops.structs import enums, layouts

HEADER = Path(__file__).parents[2] / "native" / "arguments.h"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

needs_kernels = pytest.mark.skipif(not native.available(), reason=str(native.missing()))


def test_fields_are_read_from_declarations():
    found = layouts(
        """
        // struct Comment { int32_t absent; };
        struct Pair {
            const float *first;  // struct fields; may follow
            int32_t second;
        };
        struct Whole {
            int32_t a, b;
            double c;
            float d;
            const Pair* const* many;
            Pair one, other;
            int32_t last;
        };
        """
    )
    assert list(found) == ["Pair", "Whole"]
    assert found["Pair"].fields == {"first": "P", "second": "i"}
    pair = found["Pair"].format
    kinds = {"a": "i", "b": "i", "c": "d", "d": "f", "many": "P", "one": pair, "other": pair, "last": "i"}
    assert found["Whole"].fields == kinds
    packed = found["Whole"].pack(a=1, b=2, c=3.0, d=4.0, many=5, one=(6, 7), other=(8, 9), last=10)
    assert packed == pack("=iidf4xqqi4xqi4xi4x", *range(1, 11))


@pytest.mark.parametrize(
    ("fields", "mistake"), [({"a": 0}, "missing .*'b'"), ({"a": 0, "b": 0, "c": 0}, "unexpected .*'c'")]
)
def test_other_fields_are_refused(fields, mistake):
    layout = layouts("struct S { int32_t a, b; };")["S"]
    with pytest.raises(TypeError, match=mistake):
        layout.pack(**fields)


@pytest.mark.checkout
@needs_kernels
def test_the_library_was_compiled_from_the_header_of_the_checkout():
    assert native.header() == HEADER.read_text()


@needs_kernels
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_offset_size_and_kind_of_every_field_are_the_compilers(tmp_path):
    header = native.header()
    (tmp_path / "arguments.h").write_text(header)
    kinds = {
        "i": "std::is_same<T, int32_t>::value",
        "q": "std::is_same<T, int64_t>::value",
        "f": "std::is_same<T, float>::value",
        "d": "std::is_same<T, double>::value",
        "P": "std::is_pointer<T>::value",
    }
    checks, n = [], 0
    for struct, layout in layouts(header).items():
        checks.append(f"static_assert(sizeof({struct}) == {calcsize(layout.format)});")
        before = ""
        for field, kind in layout.fields.items():
            size, before = calcsize(kind), before + kind
            same = kinds.get(kind, "std::is_class<T>::value")
            checks += [
                f"static_assert(offsetof({struct}, {field}) == {calcsize(before) - size});",
                f"static_assert(sizeof({struct}::{field}) == {size});",
                f"namespace n{n} {{ using T = decltype({struct}::{field}); static_assert({same}); }}",
            ]
            n += 1
    assert n > 90
    for enum, values in enums(header).items():
        assert values
        checks += [f"static_assert({enum}::{name} == {value});" for name, value in values.items()]
    source = tmp_path / "check.cc"
    includes = '#include <cstddef>\n#include <type_traits>\n#include "arguments.h"\n'

    def compile_checks(text):
        source.write_text(includes + "\n".join(text))
        command = [COMPILER, "-std=c++17", "-fsyntax-only", str(source)]
        return subprocess.run(command, capture_output=True, text=True)

    result = compile_checks(checks)
    assert result.returncode == 0, result.stderr
    moved = [check.replace("== 8)", "== 12)") for check in checks]
    assert compile_checks(moved).returncode != 0, "the check cannot fail"


@needs_kernels
def test_constants_have_the_order_that_python_counts_them_in():
    constants = enums(native.header())
    assert constants["Status"]["SUCCESS"] == native._SUCCESS
    assert list(constants["Type"]) == [str(dtype).removeprefix("torch.").upper() for dtype in native.TYPES]
    assert list(native.TYPES.values()) == [0, 1, 2]
    assert list(FEATURE_MAPS.values()) == list(range(len(constants["FeatureMap"])))
    for feature_map, constant in zip(FEATURE_MAPS, constants["FeatureMap"], strict=True):
        name = "identity" if feature_map is type(None) else feature_map.__name__
        assert name.upper() == constant.removesuffix("_FEATURES").replace("_", "")


@needs_kernels
def test_a_library_without_the_kernel_is_refused():
    with pytest.raises(RuntimeError, match="of another version; install unrolled again"):
        native.call("convolution")
