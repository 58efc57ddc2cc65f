"""The description of the API in OpenAPI's format, with the models that are served."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI


def describe_models(app: FastAPI, names: Sequence[str]) -> None:
    """Make /openapi.json list the models that a request may name."""
    generate = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            for schema in document["components"]["schemas"].values():
                if "model" in (fields := schema.get("properties", {})):
                    fields["model"] = fields["model"] | {"enum": _allowed(fields["model"], names)}
            for operation in document["paths"]["/v1/models/{id}"].values():
                operation["parameters"][0]["schema"]["enum"] = list(names)
        return app.openapi_schema or {}

    app.openapi = described  # type: ignore[method-assign]


def _allowed(field: dict[str, Any], names: Sequence[str]) -> list[str | None]:
    return [*names, None] if "anyOf" in field else list(names)
