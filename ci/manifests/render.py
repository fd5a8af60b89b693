"""Renders the chart and reads manifests; judges every object by the schemas of the API.

Takes JSON on stdin: the chart's folder, cases with a release's name and values (a file in the
chart's folder ci, or values themselves), files of manifests, and files of plain YAML. Prints JSON:
for each case its objects, or why it was refused, what is wrong with objects, and the plain YAML.
"""

import json
import pathlib
import sys

import helm_python
import kubernetes_validate
import yaml

# Of other projects: their schemas are not those of the API.
FOREIGN = {
    "Component",
    "DataImportCron",
    "DataVolume",
    "Kustomization",
    "PodMonitor",
    "PrometheusRule",
    "ServiceMonitor",
    "SnapshotMetadataService",
    "StorageProfile",
    "VolumeGroupSnapshotClass",
    "VolumeSnapshot",
    "VolumeSnapshotClass",
}

# The newest one that there is a schema of.
VERSION = "1.37.0"


def objects_of(text):
    return [one for one in yaml.safe_load_all(text) if one is not None]


def problems_of(name, one):
    where = f"{name}: {one.get('kind')} {one.get('metadata', {}).get('name')}"
    if one.get("kind") in FOREIGN:
        return [] if "." in one.get("apiVersion", "") else [f"{where}: no apiVersion"]
    # Served up to 1.36 and newer as v1, which has the same fields.
    if one.get("kind") == "VolumeAttributesClass":
        one = {**one, "apiVersion": "storage.k8s.io/v1"}
    try:
        kubernetes_validate.validate(one, VERSION, strict=True)
    except Exception as error:  # whatever it is, it is said
        return [f"{where}: {error!r:.500}"]
    return []


def main():
    asked = json.load(sys.stdin)
    chart = pathlib.Path(asked["chart"])
    answer = {"objects": {}, "refused": {}, "problems": []}
    with helm_python.Chart.load(str(chart)) as loaded:
        for name, case in asked["cases"].items():
            values = case.get("values", {})
            if "file" in case:
                values = yaml.safe_load((chart / "ci" / case["file"]).read_text()) or {}
            try:
                loaded.validate_schema(values)
                files = loaded.render(values, name=case["release"], namespace=case["namespace"])
            except helm_python.HelmError as error:
                answer["refused"][name] = str(error)
                continue
            answer["objects"][name] = [
                one
                for file, text in sorted(files.items())
                if file.endswith(".yaml")
                for one in objects_of(text)
            ]
    for name, file in asked["files"].items():
        answer["objects"].setdefault(name, []).extend(objects_of(pathlib.Path(file).read_text()))
    answer["plain"] = {
        name: yaml.safe_load(pathlib.Path(file).read_text())
        for name, file in asked.get("plain", {}).items()
    }
    for name, objects in answer["objects"].items():
        for one in objects:
            answer["problems"].extend(problems_of(name, one))
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
