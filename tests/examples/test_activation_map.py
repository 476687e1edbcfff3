"""The example of a map of activations: what is recorded, projected and drawn."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture(scope="module")
def example() -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import activation_map
    finally:
        sys.path.remove(str(EXAMPLES))
    return activation_map


def test_activations_and_gradients_are_those_of_every_block(example: Any) -> None:
    torch.manual_seed(0)
    model = example.make_model(3, 16, 8)
    tokens = torch.randint(256, (2, 8))
    kept: list[torch.Tensor] = []
    hooks = [block.register_forward_hook(lambda *call: kept.append(call[2])) for block in model.transformer.h]
    model(tokens, labels=tokens)
    for hook in hooks:
        hook.remove()

    forward, backward = example.record_step(model, tokens)
    outputs = [each if isinstance(each, torch.Tensor) else each[0] for each in kept]
    expected = torch.stack(outputs)[:, :, :-1].flatten(1, 2).detach().numpy()
    np.testing.assert_array_equal(forward, expected)
    assert backward.shape == forward.shape == (3, 14, 16)
    assert np.abs(backward).max() > 0


def test_the_plane_holds_what_differs_most(example: Any) -> None:
    angle = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    circle = np.stack([np.cos(angle), np.sin(angle), 0 * angle], axis=-1).astype(np.float32)
    plane = example.project(np.stack([circle, 5 * circle]), umap=False)

    assert plane.shape == (2, 12, 2)
    np.testing.assert_allclose(np.linalg.norm(plane, axis=-1), 1, atol=1e-6)
    np.testing.assert_allclose(plane[0], plane[1], atol=1e-6)


def test_bytes_have_kinds(example: Any) -> None:
    found = {each: example.kind_of(ord(each)) for each in "aZ \n7(ÿ"}
    assert list(found.values()) == ["vowel", "consonant", "space", "space", *["digit or sign"] * 3]


def test_the_script_writes_a_picture(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--steps=2", "--layers=2", "--width=16", "--context=8", "--passages=2"]
    path = tmp_path / "map.png"
    example.main([*small, "-o", str(path)])
    assert capsys.readouterr().out.startswith(f"{path}: 2 layers, 14 tokens, loss ")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_umap_that_is_not_installed_says_how_to_get_it(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "umap", None)
    with pytest.raises(SystemExit, match=r"^--umap needs umap-learn: pip install umap-learn\."):
        example.project(np.ones((1, 3, 2), np.float32), umap=True)
