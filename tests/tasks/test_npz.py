"""A user's own arrays become a task; arrays that cannot are refused by name."""

import numpy as np
import pytest
import torch

from dpsur.errors import InvalidInputError
from dpsur.features import compute, features_named
from dpsur.networks import build_network
from dpsur.tasks import Declared, npz, task_named

Y = np.array([0, 2, 1, 0])
CNN = {"name": "small-cnn", "classes": 3}


def write(tmp_path, **arrays):
    path = tmp_path / "own.npz"
    np.savez(path, **{"classes": 3, **arrays})
    return f"npz:{path}"


@pytest.mark.parametrize(
    ("shape", "features", "network"),
    [
        ((4, 7), "vectors", {"name": "mlp", "inputs": 7, "hidden": 32, "classes": 3}),
        ((4, 900), "vectors", {"name": "linear", "inputs": 900, "classes": 3}),
        ((4, 9, 8), "pixels", {**CNN, "channels": 1, "height": 9, "width": 8}),
        ((4, 2, 9, 8), "pixels", {**CNN, "channels": 2, "height": 9, "width": 8}),
        ((4, 3, 9, 3), "pixels", {"name": "mlp", "inputs": 81, "hidden": 32, "classes": 3}),
        ((4, 5, 5, 3), "pixels", {"name": "mlp", "inputs": 75, "hidden": 32, "classes": 3}),
        ((4, 6, 5), "pixels", {"name": "mlp", "inputs": 30, "hidden": 32, "classes": 3}),
        ((4, 99, 5), "pixels", {"name": "linear", "inputs": 495, "classes": 3}),
    ],
)
def test_the_network_follows_the_shape(tmp_path, shape, features, network):
    values = np.random.default_rng(0).normal(size=shape)
    task = task_named(write(tmp_path, x=values, y=Y))
    assert task.default_features == features
    networks = dict(task.networks)
    head = networks.pop("encoder", None)
    for name in ("encoder-zoom", "whitened-scattering", "scattering+encoder"):
        assert (networks.pop(name, None) is None) == (head is None)
    assert networks == {features: network}
    if network["name"] == "small-cnn":
        inputs = 8192 * network["channels"]
        assert head == {"name": "linear-head", "inputs": inputs, "classes": 3}
    else:
        assert head is None
    train, test = task.load(None)
    assert test is None
    assert train.inputs.dtype == torch.float32
    expected = torch.from_numpy(values).float()
    assert torch.equal(train.inputs, expected.unsqueeze(1) if len(shape) == 3 else expected)
    assert train.targets.dtype == torch.int64
    assert train.targets.tolist() == Y.tolist()
    assert build_network(network)(train.inputs).shape == (4, 3)


@pytest.mark.parametrize(
    ("shape", "maps"),
    [((4, 12, 8), (81, 3, 2)), ((4, 3, 8, 16), (243, 2, 4)), ((4, 9, 8), None), ((4, 2, 2), None)],
)
def test_images_have_a_linear_model_on_scattering_features_where_their_size_allows(
    tmp_path, shape, maps
):
    task = task_named(write(tmp_path, x=np.zeros(shape), y=Y))
    assert task.default_features == "pixels"
    if maps is None:
        assert "scattering" not in task.networks
        return
    sides = dict(zip(("channels", "height", "width"), maps, strict=True))
    network = task.networks["scattering"]
    assert network == {"name": "linear-features", **sides, "classes": 3}
    inputs = task.load(None)[0].inputs
    features = compute(features_named("scattering"), inputs, cached=False)
    assert build_network(network)(features).shape == (4, 3)


def test_only_bytes_of_images_are_scaled(tmp_path):
    images = np.arange(4 * 9, dtype=np.uint8).reshape(4, 3, 3) * 7
    for values, factor in (
        (images, 255),
        (images.reshape(4, 9), 1),
        (images.astype(np.int32), 1),
        (images.astype(np.float64), 1),
    ):
        train, _ = task_named(write(tmp_path, x=values, y=Y)).load(None)
        expected = torch.from_numpy(values.astype(np.float32)) / factor
        assert torch.equal(train.inputs.reshape(values.shape), expected)


def test_test_records_are_used(tmp_path):
    x = np.zeros((4, 2))
    name = write(tmp_path, x=x, y=Y, x_test=x[:2], y_test=np.array([4, 0], np.uint8), classes=5)
    task = task_named(name)
    train, test = task.load(None)
    assert (len(train), len(test)) == (4, 2)
    assert task.networks["vectors"]["classes"] == 5
    assert task.records == 4


def without_classes(tmp_path, **arrays):
    path = tmp_path / "own.npz"
    np.savez(path, **arrays)
    return f"npz:{path}"


def test_the_number_of_classes_is_declared_in_the_file_or_beside_it(tmp_path):
    x = np.zeros((4, 2))
    declared = task_named(write(tmp_path, x=x, y=Y, classes=10))
    assert declared.networks["vectors"]["classes"] == 10
    assert declared.public == {"classes": 10}
    assert task_named(write(tmp_path, x=x, y=Y, classes=10), Declared(classes=10)).public == {
        "classes": 10
    }
    name = without_classes(tmp_path, x=x, y=Y)
    assert task_named(name, Declared(classes=7)).networks["vectors"]["classes"] == 7
    for wrong in (-1, 0, 1, 10**9, 10**400, 2.5):
        with pytest.raises(InvalidInputError, match="classes must be a whole number"):
            task_named(name, Declared(classes=wrong))
    for wrong in (2.5, [4, 5]):
        with pytest.raises(InvalidInputError, match="array classes .* single whole number"):
            task_named(write(tmp_path, x=x, y=Y, classes=wrong))
    with pytest.raises(InvalidInputError, match="classes 4 contradicts .* declares 3"):
        task_named(write(tmp_path, x=x, y=Y), Declared(classes=4))
    with pytest.raises(InvalidInputError, match="classes 4 is for npz:FILE; task mnist-5k has"):
        task_named("mnist-5k", Declared(classes=4))


def test_without_a_declared_number_of_classes_nothing_is_trained(tmp_path):
    name = without_classes(tmp_path, x=np.zeros((4, 2)), y=Y)
    with pytest.raises(InvalidInputError, match="--classes K, or save it") as refused:
        task_named(name)
    assert len(str(refused.value).splitlines()) == 1


def one_record_does_not_change_what_is_released(tmp_path):
    """Neighbours: the second has one record more, with a label that the first does not have."""
    shapes = []
    for labels in ([0, 1, 0, 1], [0, 1, 0, 1, 5]):
        name = without_classes(tmp_path, x=np.zeros((len(labels), 2)), y=np.array(labels))
        task = task_named(name, Declared(classes=6))
        network = build_network(task.networks["vectors"])
        shapes.append({key: value.shape for key, value in network.state_dict().items()})
    assert shapes[0] == shapes[1]


def test_a_new_label_does_not_change_the_shape_of_the_release(tmp_path, monkeypatch):
    one_record_does_not_change_what_is_released(tmp_path)

    def from_labels(path, given, stored):
        """As it was once: the largest label plus 1."""
        train, *_ = npz._records([path])
        return max(2, int(train.targets.max()) + 1)

    monkeypatch.setattr(npz, "_declared", from_labels)
    with pytest.raises(AssertionError):
        one_record_does_not_change_what_is_released(tmp_path)


def test_a_changed_file_is_read_again(tmp_path):
    first = task_named(write(tmp_path, x=np.zeros((4, 2)), y=Y))
    second = task_named(write(tmp_path, x=np.ones((4, 3)), y=Y))
    assert first.load(None)[0].inputs.shape == (4, 2)
    assert second.load(None)[0].inputs.shape == (4, 3)


X = np.zeros((4, 2))
NAN = np.array([[0.0, 1], [0, np.nan], [0, 0], [0, 0]])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "holds no array y"),
        ({"y": Y}, "holds no array x"),
        ({"x": X, "y": Y, "x_test": X}, "both x_test and y_test"),
        ({"x": X, "y": Y, "y_test": Y}, "both x_test and y_test"),
        ({"x": X, "y": Y[:3]}, "4 records in x but 3 labels in y"),
        ({"x": X, "y": Y, "x_test": X, "y_test": Y[:1]}, "x_test but 1 labels in y_test"),
        ({"x": X, "y": Y, "x_test": X[:, :1], "y_test": Y}, r"\(2,\), those of x_test \(1,\)"),
        ({"x": np.array([1, "a", None, 2.0], object), "y": Y}, "Python objects in the array x"),
        ({"x": X, "y": np.array([0, 1, None, 2], object)}, "Python objects in the array y"),
        ({"x": np.array([["a"], ["b"], ["c"], ["d"]]), "y": Y}, "array x .* or texts of shape"),
        ({"x": X + 1j, "y": Y}, "array x .* real numbers"),
        ({"x": NAN, "y": Y}, "array x .* NaN"),
        ({"x": NAN - np.inf, "y": Y}, "array x .* NaN"),
        ({"x": X + 1e300, "y": Y}, "beyond float32"),
        ({"x": X, "y": Y, "x_test": NAN, "y_test": Y}, "array x_test .* NaN"),
        ({"x": X, "y": Y.astype(float)}, "array y .* whole number .* float64"),
        ({"x": X, "y": np.eye(4, dtype=int)}, r"array y .* shape \(4, 4\)"),
        ({"x": X, "y": Y - 1}, "array y .* not in 0 to"),
        ({"x": X, "y": Y + 1}, "array y .* not in 0 to 2; number the classes 0, 1"),
        ({"x": X, "y": Y + 10**9}, "array y .* not in 0 to"),
        ({"x": X, "y": np.full(4, 2**64 - 1, np.uint64)}, "array y .* not in 0 to"),
        ({"x": np.zeros((4, 9, 8, 3)), "y": Y}, r"channels .* last; .* save x.transpose\(0, 3, 1"),
        ({"x": np.zeros(4), "y": Y}, r"array x .* shape \(4,\)"),
        ({"x": np.float64(3), "y": Y}, r"array x .* shape \(\)"),
        ({"x": np.zeros((4, 1, 1, 1, 1)), "y": Y}, "array x .* shape"),
        ({"x": np.zeros((0, 2)), "y": Y[:0]}, r"array x .* shape \(0, 2\)"),
        ({"x": X, "y": Y, "label": Y}, "'label'; the known ones are x, y"),
    ],
)
def test_arrays_that_cannot_be_used_are_named(tmp_path, arrays, message):
    with pytest.raises(InvalidInputError, match=f"own.npz.*{message}|{message}.*own.npz|{message}"):
        task_named(write(tmp_path, **arrays))


def test_files_that_cannot_be_used_are_named(tmp_path):
    path = tmp_path / "own.npz"
    with pytest.raises(InvalidInputError, match="there is no file .*own.npz"):
        task_named(f"npz:{path}")
    name = write(tmp_path, x=X, y=Y)
    whole = path.read_bytes()
    np.save(tmp_path / "own.npy", X)
    single = (tmp_path / "own.npy").read_bytes()
    flipped = whole.replace(Y.tobytes(), (Y + 1).tobytes())
    for content in (b"", b"text", whole[: len(whole) // 2], b"PK\x03\x04", single, flipped):
        path.write_bytes(content)
        with pytest.raises(InvalidInputError, match="own.npz is damaged, or not a file"):
            task_named(name)
