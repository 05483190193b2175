"""The faults of the field that a calbin makes impossible, by requirement number."""

from __future__ import annotations

import pytest
from calbin_tiny import assemble
from malformed import set_at

from calc.calbin.validate import validate
from calc.core.errors import CalcError, VersionError


def codes(parts, *changes: tuple[str, object], kind: type[CalcError] = CalcError) -> tuple[str, ...]:
    def edit(m):
        for path, value in changes:
            set_at(m, path, value)

    data = assemble(parts, edit=edit)
    with pytest.raises(kind) as e:
        validate(memoryview(data), len(data), deep=False)
    return e.value.codes


def test_r1_a_prefill_sub_model_marked_as_decode(one):
    assert codes(one, ("submodels[0].model_type", "llm_decode")) == ("CALBIN_ROLE",)


@pytest.mark.parametrize("name", ["macs", "vector_ops", "dram_bytes", "host_bytes", "cycles"])
def test_r2_workload_zero(one, name):
    assert codes(one, (f"submodels[0].workload.{name}", 0)) == ("CALBIN_WORKLOAD",)


def test_r3_empty_target_chip_list(one):
    assert codes(one, ("submodels[1].target_chips", ())) == ("CALBIN_TARGET_CHIPS",)


def test_r4_a_sub_model_is_found_by_role_batch_and_bucket_alone(one):
    twice = (("submodels[1].role", "prefill"), ("submodels[1].model_type", "llm_prefill"), ("submodels[1].seq", 8))
    assert "CALBIN_ROLE" in codes(one, *twice)
    free = [("submodels[0].name", "second"), ("submodels[1].name", "first, a decoy called prefill")]
    data = assemble(one, edit=lambda m: [set_at(m, p, v) for p, v in free])
    roles = {s.name: s.role for s in validate(memoryview(data), len(data), deep=False).submodels}
    assert roles == {"second": "prefill", "first, a decoy called prefill": "decode"}


def test_r5_layout_tile_and_valid_range_of_every_tensor(one):
    assert codes(one, ("submodels[0].outputs[0].tile", (0, 16))) == ("CALBIN_TILE",)
    assert "CALBIN_PADDED" in codes(one, ("submodels[0].outputs[0].padded_shape", (1, 32)))
    assert codes(one, ("submodels[0].inputs[0].valid", ())) == ("CALBIN_UNBOUNDED", "CALBIN_UNBOUNDED")
    assert codes(one, ("submodels[0].inputs[0].valid[0].csr", "nope"))[0] == "CALBIN_VALID"
    assert codes(one, ("submodels[0].outputs[0].layout", "")) == ("CALBIN_ENUM",)


@pytest.mark.parametrize("name", ["input0", "inputs[0]", "0", "output_1", "arg.2", "tensor3"])
def test_r6_no_tensor_is_named_by_its_place(one, name):
    assert codes(one, ("submodels[0].inputs[0].name", name)) == ("CALBIN_ANONYMOUS",)


@pytest.mark.parametrize(("name", "value"), [("dram_bytes", 32768), ("sram_bytes", 18), ("dram_bytes", 3)])
def test_r9_capacities_in_other_units(one, name, value):
    assert "CALBIN_UNITS" in codes(one, (f"target.{name}", value))


@pytest.mark.parametrize(
    ("path", "value", "code"),
    [
        ("isa", "other", "CALBIN_ISA"),
        ("isa_version", (1, 9), "CALBIN_ISA"),
        ("runtime_min", (1, 1), "CALBIN_RUNTIME"),
        ("driver_min", (9, 0), "CALBIN_DRIVER"),
    ],
)
def test_r10_r11_versions_that_do_not_fit_are_told_at_open(one, path, value, code):
    assert codes(one, (f"compatibility.{path}", value), kind=VersionError) == (code,)


def test_r11_every_version_that_does_not_fit_is_told_at_once(one):
    changes = (("compatibility.isa", "x"), ("compatibility.runtime_min", (2, 0)), ("compatibility.driver_min", (2, 0)))
    assert codes(one, *changes, kind=VersionError) == ("CALBIN_ISA", "CALBIN_RUNTIME", "CALBIN_DRIVER")


def test_golden_vectors_are_optional(one):
    one.sections = [s for s in one.sections if s[0] != "golden"]
    data = assemble(one, edit=lambda m: m.update(golden=None, arrays=()))
    assert validate(memoryview(data), len(data), deep=True).golden is None


def test_others_than_the_reference_have_a_row_of_logits_per_call(one):
    one.replace("golden", one.content("golden") + bytes(3 * 256))
    more = {
        "name": "program/logits",
        "dtype": "f32",
        "shape": (3, 64),
        "offset": len(one.content("golden")) - 768,
        "nbytes": 768,
    }
    data = assemble(one, edit=lambda m: m["arrays"].append(more))
    assert validate(memoryview(data), len(data), deep=True).arrays[2].shape == (3, 64)


def test_an_encoder_needs_neither_role_nor_states(one):
    one.sections = [s for s in one.sections if s[0] != "program.decode_b1_s1.0"]

    def edit(m):
        del m["submodels"][1]
        m["submodels"][0].update(role="encode", model_type="encoder")
        m["states"]["states"] = ()

    data = assemble(one, edit=edit)
    assert validate(memoryview(data), len(data), deep=True).submodels[0].role == "encode"
