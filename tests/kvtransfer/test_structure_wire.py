"""What a text is held to survives the way to a worker."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling_params import SamplingParams
from engine.structure.spec import Structure, StructureKind
from kvtransfer.sampling_wire import (
    sampling_params_from_wire,
    sampling_params_to_wire,
    structure_from_wire,
    structure_to_wire,
)
from tandem.v1 import sampling_pb2

texts = st.text(st.characters(codec="utf-8"), max_size=20)
written = [kind for kind in StructureKind if kind not in (StructureKind.JSON_OBJECT, StructureKind.CHOICE)]
structures = st.one_of(
    st.just(Structure(StructureKind.JSON_OBJECT)),
    st.builds(Structure, st.sampled_from(written), texts),
    st.builds(Structure, st.just(StructureKind.JSON_SCHEMA), texts, st.booleans()),
    st.builds(Structure.of_choices, st.lists(texts, max_size=4)),
)


@given(st.none() | structures)
def test_a_structure_survives_the_wire(structure: Structure | None) -> None:
    params = SamplingParams(max_tokens=1, structure=structure)
    wire = sampling_pb2.SamplingParams.FromString(sampling_params_to_wire(params).SerializeToString())
    assert wire.HasField("structure") == (structure is not None)
    assert sampling_params_from_wire(wire).structure == structure


@given(structures)
def test_a_structure_names_its_kind_on_the_wire(structure: Structure) -> None:
    wire = structure_to_wire(structure)
    assert wire is not None
    assert wire.WhichOneof("structure") == structure.kind.value


@given(st.lists(texts, max_size=4))
def test_choices_travel_as_strings(choices: list[str]) -> None:
    wire = structure_to_wire(Structure.of_choices(choices))
    assert wire is not None
    assert list(wire.choice.strings) == choices
    received = structure_from_wire(wire)
    assert received is not None
    assert received.choices() == choices


@pytest.mark.parametrize(
    "wire", [sampling_pb2.StructuredOutput(), sampling_pb2.StructuredOutput(json_object=False)], ids=["empty", "false"]
)
def test_a_structure_that_says_nothing_is_free_text(wire: sampling_pb2.StructuredOutput) -> None:
    assert structure_from_wire(wire) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [("[1]", "must be an array of strings"), ('{"a": 1}', "must be an array of strings"), ("[", "is not JSON")],
)
def test_a_choice_that_is_none_is_not_sent(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        structure_to_wire(Structure(StructureKind.CHOICE, text))


def test_text_that_utf_8_cannot_express_is_not_sent() -> None:
    with pytest.raises(ValueError, match="surrogates not allowed"):
        structure_to_wire(Structure(StructureKind.REGEX, "\ud800"))
    with pytest.raises(ValueError, match="surrogates not allowed"):
        structure_to_wire(Structure.of_choices(["\ud800"]))
