"""What /openapi.json says of the addresses: bodies, answers and every refusal, so that a client can be made from it."""

from __future__ import annotations

from typing import Any, Final

from diffpure.serve.decoding import TYPES
from diffpure.serve.limits import Limits

Schema = dict[str, Any]
JSON: Final = "application/json"
IMAGES: Final = frozenset(TYPES.values())
_ANY_IMAGE: Final[Schema] = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in sorted(IMAGES)}
_NUMBERS: Final[Schema] = {"type": "array", "items": {"type": "number"}}
_ERROR: Final[Schema] = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string", "description": "One sentence: what was wrong and what is accepted."}},
}
_FAILED: Final[Schema] = {
    "type": "object",
    "required": ["error", "status"],
    "properties": {**_ERROR["properties"], "status": {"type": "integer"}},
    "additionalProperties": False,
}
_PURIFIED: Final[Schema] = {
    "type": "object",
    "required": ["image", "type"],
    "properties": {
        "image": {"type": "string", "contentEncoding": "base64"},
        "type": {"type": "string", "enum": sorted(IMAGES)},
    },
    "additionalProperties": False,
}
_CLASSIFIED: Final[Schema] = {
    "type": "object",
    "required": ["label", "name", "draws", "agreement", "logits", "probabilities", "spread", "names"],
    "properties": {
        "label": {"type": "integer", "description": "The class of the largest averaged logit."},
        "name": {"type": ["string", "null"]},
        "draws": {"type": "integer", "description": "Purifications, each with noise of its own."},
        "agreement": {"type": "number", "description": "The share of draws whose own largest logit is the label's."},
        "logits": {**_NUMBERS, "description": "Averaged over the draws, or what the defence's own vote makes of them."},
        "probabilities": {**_NUMBERS, "description": "The softmax of the averaged logits."},
        "spread": {
            "type": ["array", "null"],
            "items": {"type": "number"},
            "description": "The standard deviation of each.",
        },
        "names": {"type": "array", "items": {"type": "string"}},
    },
    "additionalProperties": False,
}
_REFUSALS: Final = {
    400: "The body is empty or no JSON.",
    401: "The token is missing or wrong.",
    408: "The body did not arrive in time.",
    413: "Too many bytes or pixels.",
    415: "Another content type than is accepted.",
    422: "What was sent cannot be used: no image, a damaged one, or one that the model gives no finite answer to.",
    503: "The service is busy or the model failed; Retry-After says when to try again.",
    504: "The time of the request is over; its work was stopped.",
}


def purify() -> Schema:
    """One image in, the same kind of image out."""
    return _route(_ANY_IMAGE, _ANY_IMAGE, "The purified image, in the same format.")


def classify() -> Schema:
    """One image in, numbers out."""
    return _route(_ANY_IMAGE, {JSON: {"schema": _CLASSIFIED}}, "What the defended classifier says.")


def purify_batch(limits: Limits) -> Schema:
    """Many images in, a purified one or an error for each."""
    return _batch(limits, _PURIFIED)


def classify_batch(limits: Limits) -> Schema:
    """Many images in, a classification or an error for each."""
    return _batch(limits, _CLASSIFIED)


def text(kind: str, what: str, *statuses: int) -> Schema:
    """A page without a body to send: its media type, and the refusals it has."""
    content = {JSON: {"schema": {"type": "object"}}} if kind == JSON else {kind: {"schema": {"type": "string"}}}
    return {"responses": {200: {"description": what, "content": content}, **_refusals(*statuses)}}


def _route(body: Schema, content: Schema, what: str) -> Schema:
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": body}},
        "responses": {200: {"description": what, "content": content}, **_refusals(*_REFUSALS)},
    }


def _refusals(*statuses: int) -> dict[int, Schema]:
    return {status: {"description": _REFUSALS[status], "content": {JSON: {"schema": _ERROR}}} for status in statuses}


def _batch(limits: Limits, of: Schema) -> Schema:
    images = {
        "type": "array",
        "items": {"type": "string", "contentEncoding": "base64"},
        "minItems": 1,
        "maxItems": limits.images,
        "description": "Image files in base64.",
    }
    body = {"type": "object", "required": ["images"], "properties": {"images": images}, "additionalProperties": False}
    results = {"type": "array", "items": {"anyOf": [of, _FAILED]}}
    answer = {"type": "object", "required": ["results"], "properties": {"results": results}}
    return _route(
        {JSON: {"schema": body}}, {JSON: {"schema": answer}}, "A result or an error for each image, in their order."
    )
