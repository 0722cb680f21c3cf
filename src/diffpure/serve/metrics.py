"""What Prometheus reads of a service, by the client library of Prometheus itself."""

from __future__ import annotations

from typing import Any, Final, final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_IMAGES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@final
class Metrics:
    """Counters of one service; two services in one process do not share them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.accepted = self.answered = 0  # requests

        def each(kind: type, name: str, text: str, labels: tuple[str, ...] = (), **more: object) -> Any:
            return kind(f"diffpure_{name}", text, labels, registry=self._registry, **more)

        self.requests = each(Counter, "requests", "Requests that were answered.", ("endpoint", "status"))
        self.seconds = each(Histogram, "request_seconds", "Time of a request.", ("endpoint",), buckets=_SECONDS)
        self.images = each(Counter, "images", "Images by what became of them.", ("kind", "status"))
        self.batches = each(Histogram, "batch_images", "Images that were computed together.", buckets=_IMAGES)
        self.computing = each(Counter, "compute_seconds", "Time that the model computed.")
        self.house = each(Gauge, "images_in_house", "Images that were accepted and are not answered yet.")
        self.restarts = each(Gauge, "decoder_restarts", "Decoding processes that died and were replaced.")

    def text(self) -> bytes:
        """The page that Prometheus asks for."""
        text: bytes = generate_latest(self._registry)
        return text
