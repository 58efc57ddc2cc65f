"""The files in deploy/: read, and checked by what reads them."""

from typing import Any

import pytest
import yaml
from documents import ROOT

pytestmark = pytest.mark.checkout


def documents() -> dict[str, Any]:
    """The objects of kuberay.yaml, by their names."""
    with (ROOT / "deploy" / "kuberay.yaml").open() as file:
        return {each["metadata"]["name"]: each for each in yaml.safe_load_all(file)}


def test_what_the_cluster_names_is_there() -> None:
    found = documents()
    cluster = found["unrolled"]["spec"]["rayClusterConfig"]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={cluster['rayVersion']}" in pins
    [workers] = cluster["workerGroupSpecs"]
    spec = workers["template"]["spec"]
    [container] = spec["containers"]
    mounted = {x["name"]: x["mountPath"] for x in container["volumeMounts"]}
    volumes = {x["name"]: x for x in spec["volumes"]}
    assert mounted.keys() == volumes.keys()
    [application] = yaml.safe_load(found["unrolled"]["spec"]["serveConfigV2"])["applications"]
    arguments = application["args"]
    secret = found[volumes["keys"]["secret"]["secretName"]]
    assert arguments["keys"] in [f"{mounted['keys']}/{name}" for name in secret["stringData"]]
    assert arguments["folders"].startswith(mounted["models"])
    assert arguments["most_replicas"] == workers["maxReplicas"]
    assert arguments["cpus"] == int(container["resources"]["requests"]["cpu"])
    assert {x["secretRef"]["name"] for x in container["envFrom"]} <= found.keys()


def test_the_image_takes_what_is_there() -> None:
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    assert all((ROOT / name).exists() for names in copied for name in names)
    assert any(line.startswith("USER ") and line != "USER root" for line in lines)


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray, when it is imported
def test_ray_takes_the_configuration() -> None:
    from ray.serve.schema import ServeDeploySchema

    from unrolled.serving.ray import Arguments, app

    content = yaml.safe_load(documents()["unrolled"]["spec"]["serveConfigV2"])
    [application] = ServeDeploySchema.model_validate(content).applications
    assert application.import_path == "unrolled.serving.ray:app"
    for part, known in ((content, ServeDeploySchema), (content["applications"][0], type(application))):
        assert part.keys() <= known.model_fields.keys()  # the schema lets unknown names pass
    assert app(Arguments(**application.args)) is not None
